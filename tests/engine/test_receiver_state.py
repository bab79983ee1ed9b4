"""Which step of an update may follow which: the engine's own account of what it holds. Pure."""

from __future__ import annotations

import msgspec
import pytest

from moe_asyncrl.data.errors import StaleEpoch
from moe_asyncrl.data.weights import Base, Prepare, Stream
from moe_asyncrl.engine.plugin.weights_state import Holding, Refused


def order(update: str = "a", **more: object) -> Prepare:
    base = Prepare(
        update=update,
        epoch=3,
        version=7,
        transport="broadcast",
        streams=(Stream(number=4, sender=2, channel="g"),),
        schedules=(((4, 100), (4, 50)),),
    )
    return msgspec.structs.replace(base, **more)


def holding(**more: object) -> Holding:
    return Holding(version=6, manifest="six", epoch=3, whole_only="", **more)  # type: ignore[arg-type]


def prepared(**more: object) -> Holding:
    found = holding(**more)
    found.check_order(order(), 1)
    found.prepare(order())
    return found


def test_an_update_from_beginning_to_end() -> None:
    held = prepared()
    assert (held.state, held.sound, held.version) == ("prepared", True, 6)
    held.first_byte()
    assert (held.state, held.sound) == ("receiving", False) and "version 7 was not committed" in held.reason
    held.received()
    assert (held.state, held.sound) == ("received", False)
    with pytest.raises(Refused, match=r"as version 7 with manifest other: version 7 with manifest seven was received"):
        held.commit(7, "other", "seven")
    with pytest.raises(Refused, match="as version 8"):
        held.commit(8, "seven", "seven")
    assert held.state == "received" and not held.sound
    held.commit(7, "seven", "seven")
    assert (held.state, held.sound, held.version, held.manifest, held.reason) == ("serving", True, 7, "seven", "")
    assert held.changes == 1 and held.update == ""


@pytest.mark.parametrize("step", ["prepared", "receiving", "received"])
def test_a_failure_breaks_it_from_the_first_byte_on(step: str) -> None:
    held = prepared()
    if step != "prepared":
        held.first_byte()
    if step == "received":
        held.received()
    held.fail("the sender died")
    assert held.version == 6
    if step == "prepared":
        assert held.state == "serving" and held.sound and held.manifest == "six"
        return
    assert held.state == "broken" and not held.sound and held.reason == "the sender died"
    base = Base(version=6, manifest="six")
    with pytest.raises(Refused, match="needs all weights, not changes: the sender died"):
        held.check_order(order("b", base=base), 1)
    held.check_order(order("b"), 1)
    held.prepare(order("b"))
    assert held.state == "prepared" and not held.sound
    held.fail("again")
    assert held.state == "broken" and held.reason == "the sender died"
    held.check_order(order("c"), 1)
    held.prepare(order("c"))
    held.first_byte()
    held.received()
    held.commit(7, "seven", "seven")
    assert held.sound and held.reason == ""


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (order(epoch=2), StaleEpoch, "epoch 2, and this engine has seen epoch 3"),
        (order(version=6), Refused, "version 6 does not rise"),
        (order(version=5), Refused, "version 5 does not rise"),
        (order(base=Base(version=6, manifest="other")), Refused, "holds version 6 with manifest six"),
        (order(base=Base(version=5, manifest="six")), Refused, "changes are to version 5"),
        (order(schedules=(((4, 1),),) * 3), Refused, "3 schedules came for 1 ranks"),
        (order(schedules=(((5, 1),),)), Refused, "stream 5, which was not announced"),
        (order(schedules=(((4, 0),),)), Refused, "a message of 0 bytes"),
    ],
)
def test_orders_that_are_refused(asked: Prepare, error: type[Exception], text: str) -> None:
    held = holding()
    with pytest.raises(error, match=text):
        held.check_order(asked, 1)
    assert held == holding()


def test_a_base_must_be_one_that_is_known() -> None:
    held = Holding(version=6, manifest="", epoch=3, whole_only="")
    with pytest.raises(Refused, match="manifest unknown"):
        held.check_order(order(base=Base(version=6, manifest="")), 1)


def test_slices_and_changes_need_places() -> None:
    held = Holding(version=6, manifest="six", epoch=3, whole_only="x goes through the loader")
    with pytest.raises(Refused, match="whole tensors only, not slices: x goes through the loader"):
        held.check_order(order(transport="direct"), 1)
    with pytest.raises(Refused, match="whole tensors only, not changes"):
        held.check_order(order(base=Base(version=6, manifest="six")), 1)
    held.check_order(order(), 1)


def test_a_newer_trainer_may_go_back() -> None:
    held = holding()
    held.check_order(order(epoch=4, version=2), 1)
    held.prepare(order(epoch=4, version=2))
    with pytest.raises(StaleEpoch):
        held.check_order(order("b"), 1)


def test_one_update_at_a_time_and_each_name_once() -> None:
    held = prepared()
    with pytest.raises(Refused, match="update a already"):
        held.check_order(order(), 1)
    held.first_byte()
    with pytest.raises(Refused, match=r"update a is under way \(receiving\); update b cannot begin"):
        held.check_order(order("b"), 1)
    with pytest.raises(Refused, match="update a is under way here, not b"):
        held.check_update("b", "receiving")
    with pytest.raises(Refused, match="update a is receiving, not received"):
        held.check_update("a", "received")
    held.fail("x")
    with pytest.raises(Refused, match=r"no update is under way here, not a \(broken: x\)"):
        held.check_update("a", "receiving")
    with pytest.raises(Refused, match="update a already"):
        held.check_order(order("a"), 1)


def test_weights_by_other_ways_have_no_manifest() -> None:
    held = holding()
    held.changed_in_part()
    assert (held.manifest, held.changes, held.version) == ("", 1, 6)
    held.spoiled_elsewhere("half of a file")
    assert held.state == "broken" and held.reason == "half of a file"
    held.changed_elsewhere(9)
    assert (held.state, held.version, held.manifest, held.reason, held.changes) == ("serving", 9, "", "", 3)
