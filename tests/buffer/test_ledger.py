"""The account of prompt instances, example by example. The state machine beside it tries what nobody thought of."""

from __future__ import annotations

import pytest

from moe_asyncrl.buffer.ledger import Ledger, Limits, Slot, room
from moe_asyncrl.control.state import Rejected
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Counters, Cursor


def ledger(groups: int = 2, staleness: int = 1, attempts: int = 2, capacity: int | None = None) -> Ledger:
    capacity = (staleness + 1) * groups if capacity is None else capacity
    return Ledger(Limits(groups_per_step=groups, max_staleness=staleness, max_attempts=attempts, capacity=capacity))


def grant(book: Ledger, wanted: int = 99, version: int = 0, sender: str = "r", holding: tuple[Slot, ...] | None = None,
          now: float = 0.0) -> list[Slot]:  # fmt: skip
    """New credits only: the sender says that it has all that it was given."""
    if holding is None:
        holding = tuple(e.slot for e in book.issued.values())
    return book.grant(sender, wanted, holding, version, now)


def train(book: Ledger, step: int, groups: int = 2) -> tuple[Cursor, Counters]:
    assert book.take(step, step - 1, groups) is not None
    return book.consume(step)


# ---- room


def test_the_worked_example_of_the_docstring() -> None:
    limits = Limits(groups_per_step=4, max_staleness=1, max_attempts=1, capacity=8)
    assert room(limits, issued=0, held=0, taken=0, consumed=0, version=0) == 8
    assert room(limits, issued=0, held=0, taken=0, consumed=4, version=0) == 4
    assert room(limits, issued=2, held=2, taken=0, consumed=4, version=1) == 4
    assert room(limits, issued=4, held=4, taken=0, consumed=4, version=1) == 0


def test_every_credit_has_a_place_in_memory() -> None:
    book = ledger(groups=2, staleness=9, capacity=3)
    slots = grant(book)
    assert len(slots) == 3
    for index, attempt in slots:
        assert book.put(index, attempt, 1, 0).held
    assert grant(book) == []


def test_no_credit_before_the_first_commit() -> None:
    assert grant(ledger(), version=-1) == []


def test_a_capacity_below_one_batch_is_refused_with_its_reason() -> None:
    with pytest.raises(UserError, match=r"capacity_groups 1: less than one batch \(2 groups\)"):
        ledger(capacity=1)


def test_a_resume_counts_the_steps_before_it() -> None:
    book = ledger(groups=2, staleness=1)
    book.begin(10, Cursor(watermark=20), Counters())
    assert grant(book, version=10) == [(20, 0), (21, 0), (22, 0), (23, 0)]


# ---- credits on the way


def test_credits_lost_with_a_reply_are_granted_again_and_nothing_twice() -> None:
    book = ledger()
    first = grant(book, 3, holding=())
    assert grant(book, 3, holding=()) == first
    assert grant(book, 3, holding=tuple(first)) == [(3, 0)]


def test_credits_of_a_process_that_died_go_to_its_successor() -> None:
    book = ledger()
    first = grant(book, sender="r-0")
    assert grant(book, sender="r-1", holding=()) == []
    assert grant(book, sender="r-0", holding=()) == first


def test_credits_of_a_silent_sampler_go_to_others_and_count_as_one_attempt() -> None:
    book = ledger(groups=1, staleness=0, attempts=1)
    assert grant(book, sender="r-0", now=0.0) == [(0, 0)]
    book.seen("r-0", 100.0)
    assert book.expire(210.0, 120.0) == []
    assert book.expire(221.0, 120.0) == [(0, 0)]
    assert grant(book, sender="r-1", now=221.0) == [(0, 1)]
    late = book.put(0, 0, 8, 0)
    assert not late.held
    assert "vanished" in late.reason
    assert (book.counters.sampled, book.counters.failed) == (8, 8), "its work is accounted for"
    assert not book.put(0, 0, 8, 0).held
    assert book.counters.failed == 8, "once"
    assert book.put(0, 1, 8, 0).held


def test_a_group_that_is_sent_twice_is_held_once() -> None:
    book = ledger()
    ((index, attempt),) = grant(book, 1)
    assert book.put(index, attempt, 4, 0).fresh
    again = book.put(index, attempt, 4, 0)
    assert (again.held, again.fresh) == (True, False)
    assert len(book.held) == 1
    assert book.counters.sampled == 4


def test_a_group_that_is_sent_again_after_it_was_trained_is_not_trained_again() -> None:
    book = ledger(groups=1)
    ((index, attempt),) = grant(book, 1)
    book.put(index, attempt, 4, 0)
    train(book, 1, 1)
    again = book.put(index, attempt, 4, 0)
    assert (again.held, again.fresh) == (True, False)
    assert book.kept() == set()


def test_a_credit_that_was_never_issued_changes_nothing() -> None:
    book = ledger()
    assert not book.put(5, 0, 4, 0).held
    book.give_back(5, 0, "failed", 4)
    assert book.counters == Counters()
    assert book.waiting == {}


def test_credits_that_come_back_unused_cost_no_attempt() -> None:
    book = ledger(groups=1, staleness=0, attempts=1)
    for n in range(5):
        assert grant(book) == [(0, n)]
        book.give_back(0, n, "unused", 0)
    assert book.cursor() == Cursor()


def test_at_the_end_of_the_run_no_credits_and_lost_ones_go_back() -> None:
    book = ledger()
    grant(book, 2, holding=())
    assert book.grant("r", 4, (), 0, 0.0, new=False) == []
    assert book.issued == {}


# ---- batches


def test_fault_35_a_batch_takes_what_was_asked_for_and_the_finished_rest_stays() -> None:
    book = ledger(groups=2, staleness=2)
    for index, attempt in grant(book, 5):
        book.put(index, attempt, 4, 0)
    assert book.take(1, 0, 2) == [0, 1]
    assert sorted(book.held) == [2, 3, 4]
    cursor, counters = book.consume(1)
    assert cursor == Cursor(watermark=2)
    assert (counters.sampled, counters.trained) == (20, 8)
    assert book.take(2, 1, 2) == [2, 3]
    book.consume(2)
    assert sorted(book.held) == [4]


def test_a_batch_is_whole_or_not_there_and_a_refused_one_loses_nothing() -> None:
    book = ledger(groups=2)
    ((index, attempt),) = grant(book, 1)
    book.put(index, attempt, 1, 0)
    assert book.take(1, 0, 2) is None
    assert sorted(book.held) == [0]
    assert book.taken_step is None


def test_a_batch_that_is_taken_again_is_the_same() -> None:
    book = ledger(groups=2, staleness=2)
    for index, attempt in grant(book, 4):
        book.put(index, attempt, 1, 0)
    assert book.take(1, 0, 2) == book.take(1, 0, 2) == [0, 1]
    assert book.consume(1) == book.consume(1)
    assert book.counters.trained == 2
    with pytest.raises(Rejected, match="1 steps are done"):
        book.take(1, 0, 2)


def test_batches_out_of_order_are_refused() -> None:
    book = ledger(groups=2, staleness=2)
    for index, attempt in grant(book, 4):
        book.put(index, attempt, 1, 0)
    with pytest.raises(Rejected, match="0 steps are done"):
        book.take(2, 1, 2)
    with pytest.raises(Rejected, match="was not taken"):
        book.consume(1)
    book.take(1, 0, 2)
    with pytest.raises(Rejected, match="step 1 is not consumed"):
        book.take(2, 1, 2)
    with pytest.raises(Rejected, match="taken is 1"):
        book.consume(2)


def test_a_batch_larger_than_the_buffer_is_refused_and_not_waited_for() -> None:
    with pytest.raises(Rejected, match="99 groups from a buffer of 4"):
        ledger().take(1, 0, 99)


def test_the_oldest_tokens_are_trained_first() -> None:
    book = ledger(groups=2, staleness=2, capacity=6)
    book.begin(2, Cursor(), Counters())
    slots = grant(book, 4, version=2)
    for (index, attempt), oldest in zip(slots, (2, 1, 2, 0), strict=True):
        book.put(index, attempt, 1, oldest)
    assert book.take(3, 2, 2) == [3, 1]


# ---- staleness


def test_samples_of_no_use_are_counted_as_failed_beside_the_group_that_is_trained() -> None:
    book = ledger(groups=1, staleness=0, capacity=1)
    ((index, attempt),) = grant(book)
    assert book.put(index, attempt, 3, 0, failed=1).held and not book.put(index, attempt, 3, 0, failed=1).fresh
    assert (book.counters.sampled, book.counters.failed) == (4, 1)
    book.take(1, 0, 1)
    assert book.consume(1)[1] == Counters(sampled=4, trained=3, failed=1)


def test_what_is_too_old_on_arrival_is_not_held() -> None:
    book = ledger(groups=1, staleness=1)
    book.begin(5, Cursor(), Counters())
    ((index, attempt),) = grant(book, 1, version=5)
    result = book.put(index, attempt, 4, 3)
    assert not result.held
    assert result.reason == "stale: 2 versions old, the bound is 1"
    assert (book.counters.sampled, book.counters.stale) == (4, 4)


def test_what_the_next_batch_could_not_train_goes_stale_when_this_one_is_taken() -> None:
    book = ledger(groups=1, staleness=0)
    book.begin(1, Cursor(), Counters())
    book.limits = Limits(groups_per_step=1, max_staleness=0, max_attempts=1, capacity=3)
    for index, attempt in book.grant("r", 3, (), 9, 0.0):
        book.put(index, attempt, 1, 1)
    assert book.take(2, 1, 1) == [0]
    assert book.held == {}
    assert book.counters.stale == 2


def test_the_bound_is_checked_against_the_weights_that_the_batch_starts_from() -> None:
    book = ledger(groups=1, staleness=1)
    ((index, attempt),) = grant(book, 1)
    assert book.put(index, attempt, 4, 0).held
    assert book.take(1, 2, 1) is None
    assert (book.held, book.counters.stale) == ({}, 4)


def test_fault_37_a_prompt_that_always_goes_stale_ends_and_the_others_train() -> None:
    """It is sampled anew `max_attempts` times and then dropped; it does not stand in the way while it is tried."""
    book = ledger(groups=1, staleness=0, attempts=2)
    tries = 0
    for step in range(1, 9):
        ((index, attempt),) = grant(book, version=step - 1)
        while index == 0:
            tries += 1
            assert book.put(index, attempt, 1, step - 2).reason.startswith("stale")
            ((index, attempt),) = grant(book, version=step - 1)
        assert book.put(index, attempt, 1, step - 1).held
        train(book, step, 1)
    assert tries == 3
    assert book.counters == Counters(sampled=11, trained=8, stale=3)
    assert book.cursor() == Cursor(watermark=9)


@pytest.mark.parametrize("fate", ["failed", "filtered"])
def test_a_prompt_that_never_gives_a_group_is_dropped_and_counted(fate: str) -> None:
    book = ledger(groups=1, staleness=0, attempts=1)
    for attempt in (0, 1):
        assert grant(book) == [(0, attempt)]
        book.give_back(0, attempt, fate, 3)  # type: ignore[arg-type]
    assert grant(book) == [(1, 0)]
    assert book.cursor() == Cursor(watermark=1)
    assert getattr(book.counters, fate) == book.counters.sampled == 6


def test_fault_36_filtered_groups_give_their_place_back() -> None:
    """A thousand filtered groups in a row, and there is still as much room as in the beginning."""
    book = ledger(groups=2, staleness=1, attempts=1)
    for _ in range(250):
        slots = grant(book)
        assert len(slots) == 4
        for index, attempt in slots:
            book.give_back(index, attempt, "filtered", 8)
    assert book.room(0) == 4
    assert book.counters.filtered == 8000


# ---- resume


def test_fault_24_what_was_waiting_when_the_run_broke_off_is_served_again() -> None:
    book = ledger(groups=2, staleness=2, attempts=1)
    slots = grant(book, 6)
    for index, attempt in (slots[0], slots[2], slots[3], slots[4]):
        book.put(index, attempt, 4, 0)
    book.give_back(*slots[5], "failed", 1)
    book.give_back(*grant(book, 1)[0], "failed", 1)  # instance 5 once more, and out
    cursor, counters = train(book, 1)
    assert cursor == Cursor(watermark=1, done=(2, 5))
    later = ledger(groups=2, staleness=2)
    later.begin(1, cursor, counters)
    assert [index for index, _ in grant(later, 5, version=1)] == [1, 3, 4, 6, 7], "not 0, 2 and 5; nothing skipped"
    assert later.counters == Counters(sampled=18, trained=8, failed=2 + 8), "what memory lost is counted as failed"


def test_a_cursor_that_contradicts_itself_is_refused() -> None:
    book = ledger()
    with pytest.raises(Rejected, match="watermark 5"):
        book.begin(1, Cursor(watermark=5, done=(3,)), Counters())
