"""The state of the run: leases, commits, lives of engines, phases."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.control.state import (
    ControlState,
    Rejected,
    acquire,
    begin,
    check_epoch,
    commit,
    expire,
    join,
    leave,
    set_phase,
    step_done,
)
from moe_asyncrl.data.messages import Member, MemberId, Phase


def engine(number: int = 0, incarnation: int = 1, *, claims: str = "joining") -> Member:
    return Member(
        name=f"engine-{number}",
        url=f"http://h:{number}",
        incarnation=incarnation,
        world_size=1,
        state=claims,  # type: ignore[arg-type]
        version=99,
        heartbeat=0.0,
    )


def life(number: int = 0, incarnation: int = 1) -> MemberId:
    return MemberId(name=f"engine-{number}", incarnation=incarnation)


def started(*engines: Member) -> ControlState:
    """A run of lease 1 at step 0 whose engines wait for weights."""
    return reduce(lambda s, m: join(s, m, 0.0), engines, begin(acquire(ControlState(), "a"), 0))


def states(s: ControlState) -> dict[str, tuple[str, int]]:
    return {m.name: (m.state, m.version) for m in s.members}


# ---- leases


def test_a_lease_takes_the_run_over_and_asking_again_keeps_it() -> None:
    first = acquire(ControlState(), "a")
    assert first.epoch == 1
    assert acquire(first, "a") is first
    second = acquire(first, "b")
    assert (second.epoch, second.holder, second.begun) == (2, "b", False)
    assert acquire(second, "a").epoch == 3


def test_an_older_lease_is_stale_and_the_message_names_the_new_owner() -> None:
    s = acquire(acquire(ControlState(), "a"), "b")
    check_epoch(s, 2, may_be_unknown=False)
    check_epoch(s, 0, may_be_unknown=True)
    for epoch in (0, 1):
        with pytest.raises(Rejected, match="lease 2 is held by b") as caught:
            check_epoch(s, epoch, may_be_unknown=False)
        assert caught.value.code == "stale_epoch"
    with pytest.raises(Rejected, match="never given") as caught:
        check_epoch(s, 3, may_be_unknown=True)
    assert caught.value.code == "bad_request"


def test_without_a_lease_nobody_acts_for_the_run() -> None:
    with pytest.raises(Rejected, match="nobody owns the run"):
        check_epoch(ControlState(), 0, may_be_unknown=False)


def test_a_new_lease_forgets_what_engines_serve() -> None:
    s = acquire(commit(started(engine()), 5, [life()], []), "b")
    assert (s.version, states(s)) == (-1, {"engine-0": ("joining", -1)})


def test_a_new_lease_wakes_a_run_that_had_ended() -> None:
    s = acquire(set_phase(started(), "failed", "boom"), "b")
    assert (s.phase, s.error) == ("starting", None)


# ---- weights and members


def test_engines_serve_only_after_a_commit_that_names_their_life() -> None:
    s = started(engine(0, claims="serving"), engine(1))
    assert states(s) == {"engine-0": ("joining", -1), "engine-1": ("joining", -1)}
    s = commit(s, 0, [life(0)], [])
    assert s.phase == "running"
    assert states(s) == {"engine-0": ("serving", 0), "engine-1": ("joining", -1)}


def test_a_server_that_was_started_again_during_the_update_does_not_serve() -> None:
    """The commit names the engine's earlier life: the weights of the new one are those of its start."""
    s = join(started(engine(0, 1)), engine(0, 2), 1.0)
    assert states(commit(s, 0, [life(0, 1)], [])) == {"engine-0": ("joining", -1)}
    assert states(commit(s, 0, [life(0, 2)], [])) == {"engine-0": ("serving", 0)}


def test_an_engine_that_an_update_left_out_serves_no_more() -> None:
    s = commit(started(engine(0), engine(1)), 0, [life(0), life(1)], [])
    assert states(commit(s, 1, [life(0)], [])) == {"engine-0": ("serving", 1), "engine-1": ("joining", 0)}


def test_late_joiners_get_the_committed_version_without_stopping_the_others() -> None:
    s = join(commit(started(engine(0)), 3, [life(0)], []), engine(1), 1.0)
    assert states(commit(s, 3, [life(1)], [])) == {"engine-0": ("serving", 3), "engine-1": ("serving", 3)}


def test_a_lost_engine_is_quarantined_until_its_next_life() -> None:
    s = commit(started(engine(0), engine(1)), 0, [life(1)], [life(0)])
    assert states(s)["engine-0"] == ("quarantined", -1)
    s = join(s, engine(0), 1.0)
    s = commit(s, 1, [life(0), life(1)], [])
    assert states(s)["engine-0"] == ("quarantined", -1), "a sign of life, or a commit, does not bring it back"
    s = begin(acquire(s, "b"), 1)
    assert states(s)["engine-0"] == ("quarantined", -1), "nor does a new trainer: what it holds is not known"
    s = join(s, engine(0, 2), 2.0)
    assert states(s)["engine-0"] == ("joining", -1)
    assert states(commit(s, 1, [life(0, 2)], [life(0, 1)]))["engine-0"] == ("serving", 1)


def test_a_life_that_is_over_can_neither_join_nor_take_its_successor_along() -> None:
    s = started(engine(0, 2))
    with pytest.raises(Rejected, match="incarnation 2, not 1"):
        join(s, engine(0, 1), 1.0)
    assert states(leave(s, life(0, 1))) == {"engine-0": ("joining", -1)}
    assert states(leave(s, life(0, 2))) == {}


def test_the_buffers_own_clock_counts_for_signs_of_life() -> None:
    s = join(started(engine(0), engine(1)), engine(1), 25.0)
    s, gone = expire(s, 31.0, 30.0)
    assert gone == (life(0),)
    assert list(states(s)) == ["engine-1"]
    assert expire(s, 31.0, 30.0) == (s, ())


def test_an_engine_that_was_only_slow_gets_weights_before_it_serves_again() -> None:
    s = commit(started(engine(0)), 0, [life(0)], [])
    s, _ = expire(s, 31.0, 30.0)
    assert states(join(s, engine(0), 32.0)) == {"engine-0": ("joining", -1)}


def test_versions_never_fall() -> None:
    s = commit(started(engine()), 3, [life()], [])
    with pytest.raises(Rejected, match="version 2 after version 3"):
        commit(s, 2, [life()], [])
    with pytest.raises(Rejected, match="before the run has begun"):
        commit(acquire(ControlState(), "a"), 0, [], [])
    with pytest.raises(Rejected, match="after the run has failed"):
        commit(set_phase(s, "failed", "x"), 4, [life()], [])


# ---- phases

PHASES: tuple[Phase, ...] = ("starting", "running", "finishing", "finished", "failed")


@pytest.mark.parametrize("a", PHASES)
@pytest.mark.parametrize("b", PHASES)
def test_phases_only_move_on(a: Phase, b: Phase) -> None:
    s = ControlState(phase=a)
    ends = ("finished", "failed")
    allowed = a == b or (a not in ends and PHASES.index(b) > PHASES.index(a))
    if allowed:
        after = set_phase(s, b, "why")
        assert after.phase == b
        assert after.error == ("why" if b == "failed" and a != b else None)
    else:
        with pytest.raises(Rejected):
            set_phase(s, b, None)


def test_the_first_error_stays() -> None:
    s = set_phase(set_phase(ControlState(), "failed", "first"), "failed", "second")
    assert s.error == "first"


# ---- whatever happens

events = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("leave"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("commit"), st.integers(0, 6), st.sets(st.tuples(st.integers(0, 2), st.integers(1, 3)))),
    st.tuples(st.just("lose"), st.integers(0, 6), st.sets(st.tuples(st.integers(0, 2), st.integers(1, 3)))),
    st.tuples(st.just("acquire"), st.sampled_from("ab"), st.none()),
    st.tuples(st.just("begin"), st.integers(0, 5), st.none()),
    st.tuples(st.just("phase"), st.sampled_from(PHASES), st.none()),
    st.tuples(st.just("step"), st.integers(0, 5), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=25))
def test_no_engine_ever_serves_a_version_that_was_not_committed_on_that_very_life(happened: list[tuple]) -> None:  # type: ignore[type-arg]
    s = ControlState()
    has: set[tuple[MemberId, int]] = set()
    for kind, a, b in happened:
        before = s
        try:
            match kind:
                case "join":
                    s = join(s, engine(a, b, claims="serving"), 0.0)
                case "leave":
                    s = leave(s, life(a, b))
                case "commit":
                    s = commit(s, a, [life(*x) for x in b], [])
                    has |= {(life(*x), a) for x in b}
                case "lose":
                    s = commit(s, a, [], [life(*x) for x in b])
                case "acquire":
                    s = acquire(s, a)
                    has = has if s is before else set()
                case "begin":
                    s = begin(s, a)
                    has = set()
                case "phase":
                    s = set_phase(s, a, None)
                case "step":
                    s = step_done(s, a)
        except Rejected:
            assert s is before
        assert s.epoch >= before.epoch
        assert len({m.name for m in s.members}) == len(s.members)
        for m in s.members:
            if m.state == "serving":
                assert (m.id, m.version) in has
                assert m.version == s.version
