"""From HF to one layout, back, to another and back, for every family: each map is a bijection and inverts exactly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from moe_asyncrl.models.algebra import Block
from moe_asyncrl.models.assemble import assemble, disassemble
from moe_asyncrl.models.features import Mtp
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.published import read_published
from moe_asyncrl.models.shards import Shard, entry_owners, rank_shards, stage_of
from moe_asyncrl.models.spec import ModelSpec
from tests.models.strategies import DENSE, MOE, WITH_MTP, specs_and_layouts
from tests.models.test_shards import numbered

CASES: list[tuple[str, Mtp | None]] = [
    (family, word) for family in (*DENSE, *MOE) for word in (("keep", "drop") if family in WITH_MTP else (None,))
]
"""Every family, with either word on multi-token-prediction layers where it has them."""
TRIPLES = 40
"""(family, layout, layout) for each case: 400 in all."""

Tensors = dict[str, torch.Tensor]


def there_and_back(spec: ModelSpec, layout: Layout, hf: Tensors) -> Tensors:
    """Every owner's parameters made of `hf`, and HF tensors made of those; each element must be given exactly once."""

    def read(block: Block) -> torch.Tensor:
        return hf[block.hf.name][block.hf_slices]

    back = {name: torch.zeros_like(value) for name, value in hf.items()}
    for entry in parameter_map(spec).entries:
        if entry.tied_copy:
            continue
        owners = entry_owners(entry, spec, layout)
        for index in range(len(owners)):
            shard = Shard(entry, index, len(owners), stage_of(entry, spec, layout)[1])
            local = torch.zeros(shard.shape, dtype=torch.int64)
            assemble(shard, read, local)
            for block, value in disassemble(shard, local):
                assert not bool(back[block.hf.name][block.hf_slices].any())
                back[block.hf.name][block.hf_slices] = value
    return back


@pytest.mark.parametrize(("family", "word"), CASES)
def test_two_layouts_one_after_the_other_give_back_every_element(family: str, word: Mtp | None) -> None:
    tried = []

    @settings(max_examples=TRIPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(specs_and_layouts(families=(family,), count=2, mtp=word))
    def check(case: tuple[ModelSpec, tuple[Layout, Layout]]) -> None:
        spec, (first, second) = case
        tried.append(case)
        hf = numbered(spec)
        once = there_and_back(spec, first, hf)
        twice = there_and_back(spec, second, once)
        assert all(torch.equal(twice[name], value) for name, value in hf.items())

    check()
    assert len(tried) >= TRIPLES and len(CASES) * TRIPLES >= 300
    assert word is None or all(spec.mtp == word and spec.mtp_layers for spec, _ in tried)


WIDE = [
    Layout(),
    Layout(tp=8, ep=8, dp=4, pp=2, stage_layers=(1, 3)),
    Layout(tp=2, ep=4, etp=2, dp=4, pp=4),
]


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "gpt-oss-120b", "glm-4.5", "minimax-m2", "mixtral-8x22b", "llama-3.1-70b"]
)
@pytest.mark.parametrize("layout", WIDE, ids=str)
def test_published_widths_are_covered_on_meta_tensors(name: str, layout: Layout) -> None:
    """Four layers of the real width: no value exists, so only places and sizes are moved."""
    published = read_published(Path("configs/models") / f"{name}.yaml", num_hidden_layers=4)
    spec = published.spec
    if not spec.is_moe:
        layout = Layout(tp=layout.tp, pp=layout.pp, dp=layout.dp, stage_layers=layout.stage_layers)
    meta = {t.name: torch.empty(t.shape, device="meta") for t in parameter_map(spec).hf_tensors()}
    covered = dict.fromkeys(meta, 0)
    seen = set()
    for rank in range(layout.world_size):
        for shard in rank_shards(spec, layout, rank):
            if shard.entry.tied_copy or rank not in entry_owners(shard.entry, spec, layout):
                continue
            local = torch.empty(shard.shape, device="meta")
            assemble(shard, lambda block: meta[block.hf.name][block.hf_slices], local)
            for block, value in disassemble(shard, local):
                assert value.shape == meta[block.hf.name][block.hf_slices].shape
                assert (block.hf.name, block.hf_ranges) not in seen
                seen.add((block.hf.name, block.hf_ranges))
                covered[block.hf.name] += math.prod(block.size)
    assert covered == {name: value.numel() for name, value in meta.items()}
