"""Replay on any two of layout, packing, recomputation and family; `soak_matrix` has all of them."""

from __future__ import annotations

import itertools

import pytest

from moe_asyncrl.models.layout import Layout
from tests.pool.pool import WorkerPool
from tests.replay.matrix import AXES, FAMILIES, TOLERANCE, Case, Matrix, pairs, pairwise_cases
from tests.train.step_jobs import deviation


@pytest.fixture(scope="module")
def matrix(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(pool, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("case", pairwise_cases(), ids=str)
def test_routers_use_the_rows_and_the_step_is_that_of_one_process(matrix: Matrix, case: Case) -> None:
    matrix.check(case)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_row_shifted_by_a_layer_would_be_seen(matrix: Matrix, family: str) -> None:
    matrix.check_planted(Case(Layout(), "packed", "off", family))


@pytest.mark.parametrize("layout", [Layout(pp=2, vpp=2), Layout(cp=2, ep=2)], ids=str)
def test_selective_recomputation_of_whole_moe_layers_runs_routers_again(matrix: Matrix, layout: Layout) -> None:
    case = Case(layout, "packed", "selective", "glm4_moe")
    _, found = matrix.run(case, modules=("core_attn", "moe"))
    assert deviation(found, matrix.reference(case.family)[1]) < TOLERANCE


def test_the_witness_can_tell(matrix: Matrix) -> None:
    case = Case(Layout(cp=2), "packed", "off", "qwen3_moe")
    with pytest.raises(AssertionError, match="'wrong': "):
        matrix.run(case, shifted=(2, 7))
    with pytest.raises(AssertionError, match="'wrong': "):
        matrix.run(case, mode="off")
    live = matrix.run(case, mode="off", witness=False)[1]
    assert deviation(live, matrix.reference(case.family)[1]) > 100 * TOLERANCE


def test_any_two_values_meet_in_the_selection() -> None:
    met = set(pairs(pairwise_cases()))
    layouts, *others = AXES
    wanted = {(str(a), b) for axis in others for a, b in itertools.product(layouts, axis)}
    wanted |= {pair for x, y in itertools.combinations(others, 2) for pair in itertools.product(x, y)}
    assert wanted <= met
