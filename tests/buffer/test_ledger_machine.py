"""Whatever order things happen in: nothing is lost, nothing is trained twice, and every bound holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moe_asyncrl.buffer.ledger import Ledger, Limits, Slot
from moe_asyncrl.data.messages import Counters, Cursor

SENDERS = ("rollout-0", "rollout-1")
SILENT_S = 10.0


class Life(RuleBasedStateMachine):
    """Samplers that lose messages and die, and a trainer that lags, breaks off and resumes; against a plain model."""

    @initialize(
        groups=st.integers(1, 3), staleness=st.integers(0, 3), attempts=st.integers(1, 2), spare=st.integers(0, 9)
    )
    def start(self, groups: int, staleness: int, attempts: int, spare: int) -> None:
        capacity = min(groups + spare, (staleness + 1) * groups)
        self.limits = Limits(groups_per_step=groups, max_staleness=staleness, max_attempts=attempts, capacity=capacity)
        self.book = Ledger(self.limits)
        self.version = 0
        self.now = 0.0
        self.has: dict[str, dict[Slot, int]] = {s: {} for s in SENDERS}  # credits, and the version they began at
        self.gone: dict[Slot, int] = {}  # credits that a sampler used, gave back or lost: their messages may come late
        self.trained: list[int] = []
        self.taken: list[int] = []
        self.saved = (0, Cursor(), Counters(), 0)

    # --- samplers

    @rule(who=st.sampled_from(SENDERS), wanted=st.integers(0, 6), lost=st.booleans())
    def ask(self, who: str, wanted: int, lost: bool) -> None:
        granted = self.book.grant(who, wanted, list(self.has[who]), self.version, self.now)
        assert len(granted) <= wanted
        assert len(set(granted)) == len(granted)
        for other in SENDERS:
            assert not set(granted) & set(self.has[other]), "a credit is held by one sampler"
        assert not {i for i, _ in granted} & set(self.trained), "what was trained is not sampled again"
        if not lost:
            self.has[who].update(dict.fromkeys(granted, self.version))

    @precondition(lambda self: any(self.has.values()))
    @rule(data=st.data(), twice=st.booleans())
    def put(self, data: st.DataObject, twice: bool) -> None:
        who, slot, began = self._pick(data)
        self._finish(who, slot, data.draw(st.integers(max(0, began - 1), self.version)), twice)

    def _finish(self, who: str, slot: Slot, oldest: int, twice: bool) -> None:
        stale = self.book.next_weights - oldest > self.limits.max_staleness
        result = self.book.put(*slot, 2, oldest)
        assert (result.held, result.fresh) == (not stale, not stale)
        assert slot[0] not in self.book.issued
        if twice:
            again = self.book.put(*slot, 2, oldest)
            assert (again.held, again.fresh) == (result.held, False)
        self.gone[slot] = oldest
        del self.has[who][slot]

    @precondition(lambda self: any(self.has.values()))
    @rule(data=st.data(), fate=st.sampled_from(["failed", "filtered", "unused"]), n=st.integers(0, 2))
    def give_back(self, data: st.DataObject, fate: str, n: int) -> None:
        who, slot, _ = self._pick(data)
        self.book.give_back(*slot, fate, n)  # type: ignore[arg-type]
        self.gone[slot] = 0
        del self.has[who][slot]

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), back=st.booleans())
    def a_message_comes_once_more(self, data: st.DataObject, back: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.gone)))
        before = (dict(self.book.held), dict(self.book.taken), dict(self.book.issued), dict(self.book.waiting))
        if back:
            self.book.give_back(*slot, "failed", 2)
        else:
            assert not self.book.put(*slot, 2, self.gone[slot]).fresh
        assert before == (self.book.held, self.book.taken, self.book.issued, self.book.waiting)

    @rule(who=st.sampled_from(SENDERS), really=st.integers(0, 3))
    def a_sampler_falls_silent(self, who: str, really: int) -> None:
        if really:
            return
        self.now += SILENT_S + 1
        for other in SENDERS:
            if other != who:
                self.book.seen(other, self.now)
        expired = self.book.expire(self.now, SILENT_S)
        for slot in expired:
            assert slot not in {s for other in SENDERS if other != who for s in self.has[other]}
        for slot in self.has[who]:
            self.gone[slot] = 0
        self.has[who] = {}

    @rule(who=st.sampled_from(SENDERS), age=st.integers(0, 4))
    def work(self, who: str, age: int) -> None:
        """The usual case: every credit that can be had becomes a group."""
        self.ask(who, 9, lost=False)
        for slot in list(self.has[who]):
            self._finish(who, slot, max(0, self.version - age), twice=False)

    # --- trainer

    @rule(commit=st.booleans())
    def step(self, commit: bool) -> None:
        """The usual case: take, train, publish."""
        self.take()
        if self.taken:
            self.consume(save=commit, twice=False)
        if commit:
            self.commit()

    @rule()
    def take(self) -> None:
        step = self.book.steps_done + 1
        before = len(self.book.held)
        batch = self.book.take(step, step - 1, self.limits.groups_per_step)
        if batch is None:
            assert not self.taken
            return
        assert self.taken in ([], batch), "a batch that is taken again is the same"
        assert len(batch) == len(set(batch)) == self.limits.groups_per_step
        assert before >= len(batch) or self.taken
        for index in batch:
            assert step - 1 - self.book.taken[index].oldest <= self.limits.max_staleness
        self.taken = batch

    @precondition(lambda self: self.taken)
    @rule(save=st.booleans(), twice=st.booleans())
    def consume(self, save: bool, twice: bool) -> None:
        step = self.book.steps_done + 1
        cursor, counters = self.book.consume(step)
        if twice:
            assert self.book.consume(step) == (cursor, counters)
        assert not set(self.taken) & set(self.trained), "nothing is trained twice"
        self.trained += self.taken
        self.taken = []
        for index in self.trained:
            assert index < cursor.watermark or index in cursor.done
        if save:
            self.saved = (step, cursor, counters, len(self.trained))

    @rule()
    def commit(self) -> None:
        self.version = self.book.steps_done

    @rule(really=st.integers(0, 7))
    def break_off_and_resume(self, really: int) -> None:
        """Back to the last checkpoint: what was trained since is undone with the weights."""
        if really:
            return
        step, cursor, counters, trained = self.saved
        self.book.begin(step, cursor, counters)
        assert self.book.cursor() == cursor
        self.trained = self.trained[:trained]
        self.taken = []
        self.version = step
        self.has = {s: {} for s in SENDERS}
        self.gone = {}
        done = set(range(cursor.watermark)) | set(cursor.done)
        assert set(self.trained) <= done

    # --- always

    @invariant()
    def bounds_hold(self) -> None:
        b, most = self.book, self.limits
        under_way = len(b.issued) + len(b.held) + len(b.taken)
        assert len(b.issued) + len(b.held) <= most.capacity
        assert under_way + b.consumed_groups <= (most.max_staleness + self.version + 1) * most.groups_per_step
        assert b.consumed_groups == len(self.trained)

    @invariant()
    def every_instance_is_in_one_place(self) -> None:
        b = self.book
        places = [set(b.issued), set(b.held), set(b.taken), set(b.waiting), set(b.cursor().done)]
        known = set().union(*places) | set(range(b.cursor().watermark))
        assert sum(map(len, places)) + b.cursor().watermark == len(known), "none is in two places"
        assert known >= set(range(b._next)), "none is lost"
        assert all(e.retries <= self.limits.max_attempts for e in (*b.issued.values(), *b.waiting.values()))

    @invariant()
    def the_account_is_balanced(self) -> None:
        c = self.book.counters
        inside = sum(e.trajectories for e in (*self.book.held.values(), *self.book.taken.values()))
        assert c.sampled == c.trained + c.stale + c.filtered + c.failed + inside
        assert c.trained == 2 * len(self.trained)

    @invariant()
    def nobody_starves(self) -> None:
        """If nothing is being sampled, no batch is there, and the weights are published: credits can be had."""
        b = self.book
        published = self.version == b.steps_done
        if published and not b.issued and b.taken_step is None and len(b.held) < self.limits.groups_per_step:
            assert b.room(self.version) >= self.limits.groups_per_step - len(b.held)

    def _pick(self, data: st.DataObject) -> tuple[str, Slot, int]:
        owned = sorted((who, slot) for who, slots in self.has.items() for slot in slots)
        who, slot = data.draw(st.sampled_from(owned))
        return who, slot, self.has[who][slot]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
