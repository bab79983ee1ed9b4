"""Places of HF tensors in a model: found by tracing, verified, and written by dense and sparse messages."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.engine.plugin import weights_learn
from moe_asyncrl.engine.plugin.weights_apply import Placer
from moe_asyncrl.engine.plugin.weights_learn import Assembly, Known, Learner
from moe_asyncrl.engine.plugin.weights_places import Place, Region, missing
from moe_asyncrl.engine.plugin.weights_state import Refused
from moe_asyncrl.engine.plugin.weights_trace import trace_load
from moe_asyncrl.weights.message import Opened, open_message
from moe_asyncrl.weights.message_part import Part, whole_part
from tests.engine import sender

EXPERTS, HIDDEN, INNER = 4, 6, 5
LOCAL = (2, 3)
"""Experts of this rank."""
SPECS: dict[str, tuple[int, ...]] = {
    "embed": (10, HIDDEN),
    "q": (8, HIDDEN),
    "k": (4, HIDDEN),
    "a": (3, HIDDEN),
    "b": (2, HIDDEN),
    "norm": (HIDDEN,),
    "scale": (1,),
    "stacked": (EXPERTS, HIDDEN, 2 * INNER),
    **{f"experts.{e}.{n}": (INNER, HIDDEN) for e in range(EXPERTS) for n in ("gate", "up")},
    **{f"experts.{e}.down": (HIDDEN, INNER) for e in range(EXPERTS)},
}


class Model(torch.nn.Module):
    """The tricks of SGLang's loaders: fusion, shards, transposes, padding, threads, concatenation, another dtype."""

    def __init__(self, opaque: bool = False) -> None:
        super().__init__()

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.full(shape, float("nan"), dtype=dtype), requires_grad=False)

        self.embed = empty(12, HIDDEN)
        self.qk = empty(6, HIDDEN)
        self.ab = empty(5, HIDDEN)
        self.norm = empty(HIDDEN, dtype=torch.bfloat16)
        self.scale = empty(1)
        self.stacked = empty(len(LOCAL), 2 * INNER, HIDDEN)
        self.w13 = empty(len(LOCAL), 2 * INNER, HIDDEN)
        self.w2 = empty(len(LOCAL), HIDDEN, INNER)
        self._opaque = opaque

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held: dict[str, torch.Tensor] = {}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = [pool.submit(self._one, name, tensor, held) for name, tensor in weights]
            for job in concurrent.futures.as_completed(jobs):
                job.result()

    def _one(self, name: str, tensor: torch.Tensor, held: dict[str, torch.Tensor]) -> None:
        if name == "embed":
            self.embed.data[:10].copy_(tensor)
            self.embed.data[10:].fill_(0)
        elif name == "q":  # rank 1 of 2
            self.qk.data.narrow(0, 0, 4).copy_(tensor.narrow(0, 4, 4))
        elif name == "k":
            self.qk.data[4:] = tensor[2:4]
        elif name in ("a", "b"):
            held[name] = tensor
            if len(held) == 2:
                self.ab.data.copy_(torch.cat([held["a"], held["b"]], dim=0))
        elif name == "norm":
            self.norm.data.copy_(tensor)
        elif name == "scale":
            self.scale.data.copy_(tensor * 2 if self._opaque else tensor)
        elif name == "stacked":
            self.stacked.data.copy_(tensor[2:4].transpose(1, 2))
        else:
            _, number, kind = name.split(".")
            if int(number) not in LOCAL:
                return
            local = int(number) - LOCAL[0]
            if kind == "down":
                self.w2.data[local].copy_(tensor)
            else:
                self.w13.data[local].narrow(0, INNER if kind == "up" else 0, INNER).copy_(tensor)


def params(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def weights(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SPECS.items()}


def parts_of(named: dict[str, torch.Tensor]) -> list[Part]:
    return [whole_part(n, sender.dtype_name(t), t.shape) for n, t in named.items()]


def opened(message: torch.Tensor) -> Opened[torch.Tensor]:
    return open_message(message, epoch=0, version=0, stream=0, number=0)


def dense(parts: list[Part], named: dict[str, torch.Tensor]) -> Opened[torch.Tensor]:
    return opened(sender.dense(parts, named, epoch=0, version=0, number=0))


def learned(model: Model, named: dict[str, torch.Tensor]) -> Known:
    learner = Learner(model.load_weights, lambda: params(model))
    learner.apply(0, dense(parts_of(named), named))
    learner.check_complete()
    return learner.known()


def loaded(named: dict[str, torch.Tensor], opaque: bool = False) -> dict[str, torch.Tensor]:
    """What the loader itself makes of them."""
    model = Model(opaque)
    model.load_weights(named.items())
    return params(model)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def test_every_tensor_of_the_model_finds_its_place() -> None:
    model = Model()
    known = learned(model, weights(0))
    assert equal(params(model), loaded(weights(0)))
    assert not known.loader
    assert {n for n, p in known.places.items() if not p} == {
        f"experts.{e}.{k}" for e in (0, 1) for k in ("gate", "up", "down")
    }
    (place,) = known.places["stacked"]
    assert (place.low, place.high) == ((2, 0, 0), (4, HIDDEN, 2 * INNER))
    new = weights(1)
    placer = Placer(known, model.load_weights, params(model), sparse=False)
    placer.apply(0, dense(parts_of(new), new))
    placer.check_complete()
    assert equal(params(model), loaded(new))


def test_the_trace_writes_nothing_and_needs_no_values() -> None:
    model = Model()
    before = {n: p.clone() for n, p in params(model).items()}
    trace = trace_load(model.load_weights, params(model), [(n, torch.float32, s) for n, s in SPECS.items()])
    assert len(trace.places) == 8 - 1 + 3 * len(LOCAL) + 1 and equal(params(model), before)


def test_what_is_more_than_a_copy_goes_through_the_loader() -> None:
    model = Model(opaque=True)
    known = learned(model, weights(0))
    assert known.loader == {"scale"} and "scale" not in known.places
    new = weights(1)
    placer = Placer(known, model.load_weights, params(model), sparse=False)
    placer.apply(0, dense(parts_of(new), new))
    placer.check_complete()
    assert equal(params(model), loaded(new, opaque=True))
    changes = sender.sparse(parts_of(new), new, weights(2), epoch=0, version=0, number=0)
    with pytest.raises(Refused, match="scale goes through the loader"):
        Placer(known, model.load_weights, params(model), sparse=True).apply(0, opened(changes))


@pytest.mark.parametrize("name", ["q", "stacked", "norm", "experts.3.up", "a"])
def test_a_place_that_is_wrong_by_one_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = weights_learn.trace_load

    def shifted(*args: object) -> object:
        trace = original(*args)  # type: ignore[arg-type]
        trace.places = [
            p
            if p.name != name
            else Place(p.name, p.shape, p.low, p.high, p.param, p.offset + (-1 if p.offset else 1), p.strides)
            for p in trace.places
        ]
        return trace

    monkeypatch.setattr(weights_learn, "trace_load", shifted)
    model = Model()
    known = learned(model, weights(0))
    assert known.loader == {name}
    new = weights(1)
    placer = Placer(known, model.load_weights, params(model), sparse=False)
    # a and b are concatenated: the loader needs both.
    if name == "a":
        return
    placer.apply(0, dense(parts_of(new), new))
    assert equal(params(model), loaded(new))


def test_a_missing_tensor_is_named() -> None:
    for name, param in (("k", "qk"), ("stacked", "stacked"), ("experts.2.up", "w13"), ("a", "ab")):
        model, old = Model(), weights(0)
        known = learned(Model(), old)
        rest = {n: t for n, t in old.items() if n != name}
        learner = Learner(model.load_weights, lambda model=model: params(model))
        learner.apply(0, dense(parts_of(rest), rest))
        with pytest.raises(Refused, match=f"parameter {param} "):
            learner.check_complete()
        placer = Placer(known, model.load_weights, params(model), sparse=False)
        placer.apply(0, dense(parts_of(rest), rest))
        with pytest.raises(Refused, match=f"0 of .* elements of {name} came, which make up parameter {param}"):
            placer.check_complete()


def test_parts_that_come_twice_do_not_make_up_for_others() -> None:
    model, old = Model(), weights(0)
    known = learned(model, old)
    placer = Placer(known, model.load_weights, params(model), sparse=False)
    twice = [p for p in parts_of(old) if p.name != "norm"]
    half = Part("norm", "float32", (HIDDEN,), ((0, HIDDEN // 2, 1),), 0)
    placer.apply(0, dense([*twice, half], old))
    placer.apply(0, dense([half], old))
    with pytest.raises(Refused, match="elements of norm came twice"):
        placer.check_complete()


def test_tensors_of_other_models_are_refused() -> None:
    model, old = Model(), weights(0)
    known = learned(model, old)
    placer = Placer(known, model.load_weights, params(model), sparse=False)
    with pytest.raises(Refused, match="other is not part of this model"):
        placer.apply(0, dense([whole_part("other", "float32", (3,))], {"other": torch.zeros(3)}))
    with pytest.raises(Refused, match=r"norm has the shape \[7\]; this model's has \[6\]"):
        placer.apply(0, dense([whole_part("norm", "float32", (7,))], {"norm": torch.zeros(7)}))


@st.composite
def cuts(draw: st.DrawFn) -> list[Part]:
    """Every tensor cut into parts along every axis, some with steps."""
    made = []
    for name, shape in SPECS.items():
        pieces: list[tuple[tuple[int, int, int], ...]] = [()]
        for size in shape:
            step = draw(st.sampled_from([1, 1, 2, 3]))
            if step > 1 and size >= step:
                ranges = [(first, size, step) for first in range(step)]
            else:
                at = draw(st.integers(0, size))
                ranges = [r for r in ((0, at, 1), (at, size, 1)) if r[0] < r[1]]
            pieces = [(*p, r) for p in pieces for r in ranges]
        made += [Part(name, "float32", shape, ranges, 0) for ranges in pieces]
    return draw(st.permutations(made))


@settings(max_examples=25, deadline=None)
@given(cuts(), st.integers(0, 1000), st.floats(0.0, 1.0))
def test_any_cut_writes_the_same_dense_and_sparse(parts: list[Part], seed: int, changed: float) -> None:
    old, new = weights(0), weights(0)
    g = torch.Generator().manual_seed(seed)
    for tensor in new.values():
        where = torch.rand(tensor.shape, generator=g) < changed
        tensor[where] = torch.randn(int(where.sum()), generator=g)
        tensor.view(-1)[0] = -0.0
    model = Model()
    known = learned(model, old)
    whole = Placer(known, model.load_weights, params(model), sparse=False)
    whole.apply(0, dense(parts, new))
    whole.check_complete()
    assert equal(params(model), loaded(new))
    other = Model()
    known = learned(other, old)
    changes = Placer(known, other.load_weights, params(other), sparse=True)
    changes.apply(0, opened(sender.sparse(parts, old, new, epoch=0, version=0, number=0)))
    assert equal(params(other), loaded(new))


def test_cut_tensors_are_loaded_whole_and_with_their_company() -> None:
    named = {"a": torch.arange(12.0).view(6, 2), "b": torch.arange(3.0)}
    assembly = Assembly()
    parts = sender.pieces([whole_part("a", "float32", (6, 2))], 4)
    first = dense([parts[0], whole_part("b", "float32", (3,))], named)
    assert assembly.add(first.parts, first.payload) == []
    first.payload.zero_()  # the buffer is used again
    assert assembly.incomplete() == ["a"]
    second = dense([parts[1]], named)
    found = dict(assembly.add(second.parts, second.payload))
    assert set(found) == {"a", "b"} and all(torch.equal(found[n], named[n]) for n in named)
    assert assembly.incomplete() == []


def test_a_tensor_that_several_senders_cut_is_put_together_and_holds_nobody_up() -> None:
    named = {"a": torch.arange(12.0).view(6, 2), "b": torch.arange(3.0), "c": torch.arange(4.0).view(4, 1)}
    assembly = Assembly()
    a, c = (
        sender.pieces([whole_part("a", "float32", (6, 2))], 4),
        sender.pieces([whole_part("c", "float32", (4, 1))], 2),
    )
    messages = [dense(parts, named) for parts in ([a[1]], [c[0]], [whole_part("b", "float32", (3,))], [c[1]], [a[0]])]
    came = [[name for name, _ in assembly.add(m.parts, m.payload)] for m in messages]
    assert came == [[], [], ["b"], ["c"], ["a"]] and assembly.incomplete() == []


def test_coverage_counts_every_element() -> None:
    held = {"p": torch.zeros(4, 6), "q": torch.zeros(8)[2:6]}
    rows = [Region("p", 6 * i, (6,), (1,)) for i in range(4)]
    assert missing(held, [*rows, Region("q", 2, (4,), (1,))]) == []
    assert missing(held, [*rows[:3], Region("p", 18, (5,), (1,)), Region("q", 1, (4,), (1,))]) == ["p", "q"]
    columns = [Region("p", i, (4,), (6,)) for i in range(6)]
    assert missing(held, [*columns, Region("q", 2, (2,), (2,))]) == ["q"]
    assert np.prod(rows[0].size) == 6
