"""The matrix of layouts, packings, recomputation and families that replay is shown on, and what is shown of a case.

The rows of a token are a function of its id and the layer, so that a hook which sees what the model is fed and what its
routers choose needs none of our bookkeeping to tell which experts a token should have had.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.train.batch import Sample
from tests.pool.pool import WorkerPool
from tests.train.sharded import assemble
from tests.train.step_jobs import deviation

TOLERANCE = 1e-5
FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
LAYOUTS = (
    Layout(),
    Layout(dp=2, ep=2),
    Layout(pp=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2, dp=2, ep=2),
    Layout(tp=2, ep=2),
    Layout(cp=2, ep=2),
)
FURTHER = (Layout(tp=2, cp=2), Layout(pp=2, cp=2, ep=2), Layout(tp=2, dp=2, ep=2, etp=2), Layout(pp=2, vpp=2, tp=2))
"""Layouts of the long form alone."""
FORMS = ("packed", "padded")
"""Several sequences a micro-batch; one each, with padding up to a multiple of 16."""
RECOMPUTE = ("off", "full", "selective")
PRECISION: dict[str, dict[str, object]] = {"deepseek_v3": {"dtype": torch.float64, "router_dtype": "fp64"}}
"""In float32, other sizes of matrix products move this model's gradients by 2e-5, on one process too; in float64 by
less than 1e-6. The others stay below 5e-6 in float32."""
AXES = (LAYOUTS, FORMS, RECOMPUTE, FAMILIES)


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell."""

    layout: Layout
    form: str
    recompute: str
    family: str

    def __str__(self) -> str:
        return f"{self.layout}-{self.form}-{self.recompute}-{self.family}"


def all_cases() -> list[Case]:
    """Every cell, layouts in order, so that process groups are formed as seldom as can be."""
    return [Case(*cell) for cell in itertools.product((*LAYOUTS, *FURTHER), FORMS, RECOMPUTE, FAMILIES)]


def pairwise_cases() -> list[Case]:
    """A selection in which any two values of two axes meet."""
    return [
        Case(layout, FORMS[(i + j) % 2], RECOMPUTE[(i + j) % 3], family)
        for (i, layout), (j, family) in itertools.product(enumerate(LAYOUTS), enumerate(FAMILIES))
    ]


def experts_by_token(spec: ModelSpec) -> np.ndarray:
    """uint8 [vocabulary, MoE layers, K]: made up, far from what the model would choose."""
    draw = np.random.default_rng(11).random((spec.vocab_size, spec.num_moe_layers, spec.num_experts))
    return draw.argsort(-1)[..., : spec.experts_per_token].astype(np.uint8)


def samples_for(spec: ModelSpec, *, shifted: tuple[int, int] | None = None) -> list[Sample]:
    """Samples of uneven lengths, one of them of two tokens. Token 0 is in none: it stands for padding alone.

    `shifted` (sample, row): that one row has each layer's experts one layer further on.
    """
    draw, table, made = np.random.default_rng(5), experts_by_token(spec), []
    for i, length in enumerate((14, 2, 25, 6, 17, 9, 11)):
        tokens = draw.integers(1, spec.vocab_size, length).astype(np.int32)
        trained = np.arange(length) >= min(length - 1, 3)
        experts = table[tokens[:-1]]
        if shifted is not None and shifted[0] == i:
            experts[shifted[1]] = np.roll(experts[shifted[1]], 1, axis=0)
        logprobs = np.where(trained, draw.normal(-3.0, 1.0, length), np.nan).astype(np.float32)
        made.append(
            Sample(
                name=f"t{i}",
                tokens=tokens,
                trained=trained,
                weight=1 / 60,
                advantage=float(draw.normal()),
                sampler_logprobs=logprobs,
                experts=experts,
            )
        )
    return made


class Matrix:
    """Runs cases on a pool; models and what one process finds are made once for each family."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self.pool = pool
        self._folder = folder
        self.model = functools.cache(self._model)
        self.reference = functools.cache(self._reference)

    def _model(self, family: str) -> tuple[str, ModelSpec]:
        path = self._folder / family
        return str(path), make_tiny_model(path, family, 3, init_std=None)

    def _reference(self, family: str) -> tuple[float, dict[str, torch.Tensor]]:
        return self.run(Case(Layout(), "packed", "off", family), witness=False)

    def run(
        self,
        case: Case,
        *,
        shifted: tuple[int, int] | None = None,
        witness: bool = True,
        modules: tuple[str, ...] = (),
        **options: object,
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and whole gradients of a step; with `witness`, after asserting that hooks saw the rows, each as often as
        there are passes, and distinct experts for padding. `modules` are recomputed instead of attention."""
        path, spec = self.model(case.family)
        given = samples_for(spec, shifted=shifted)
        answers = self.pool.run(
            "tests.replay.matrix_jobs:step",
            layout=case.layout,
            timeout_s=120.0,
            hf_dir=path,
            given=given,
            table=experts_by_token(spec),
            recompute=case.recompute,
            padded=case.form == "padded",
            build_options=PRECISION.get(case.family, {}) | ({"recompute_modules": list(modules)} if modules else {}),
            **options,
        )
        if witness:
            again = case.recompute == "full" or "moe" in modules
            wanted = {
                layer: sum(len(s.tokens) - 1 for s in given) * (3 if again else 2) for layer in spec.moe_layer_indices
            }
            found: dict[int, int] = dict.fromkeys(wanted, 0)
            for layer, counts in itertools.chain.from_iterable(a["witnessed"].items() for a in answers):
                assert counts["wrong"] == 0, f"{case}: layer {layer}: {counts}"
                assert counts["padding_twice"] == 0, f"{case}: layer {layer}: {counts}"
                found[layer] += counts["right"]
            assert found == wanted, case
        (loss,) = {a["loss"] for a in answers}
        return loss, assemble([a["gradients"] for a in answers])

    def check(self, case: Case) -> tuple[float, float]:
        """Relative deviations of loss and gradients from those of one process, asserted to be within the tolerance."""
        (loss, found), (whole_loss, whole) = self.run(case), self.reference(case.family)
        loss_off, gradient_off = abs(loss - whole_loss) / abs(whole_loss), deviation(found, whole)
        assert loss_off < TOLERANCE and gradient_off < TOLERANCE, f"{case}: {loss_off:.1e}, {gradient_off:.1e}"
        return loss_off, gradient_off

    def check_planted(self, case: Case) -> float:
        """The deviation that one row of one sample, shifted by one layer, makes: at least 100 tolerances."""
        _, found = self.run(case, shifted=(2, 7), witness=False)
        off = deviation(found, self.reference(case.family)[1])
        assert off > 100 * TOLERANCE, f"{case}: {off:.1e}"
        return off


def pairs(cases: list[Case]) -> Iterator[tuple[object, ...]]:
    """Any two values that meet in a case."""
    for case in cases:
        yield from itertools.combinations(dataclasses.astuple(case)[1:], 2)
        yield from ((str(case.layout), value) for value in (case.form, case.recompute, case.family))
