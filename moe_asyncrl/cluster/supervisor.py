"""The supervisor of a run, on one machine or many: start the roles, watch them, end the run, leave nothing behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal

from moe_asyncrl.buffer.look import trajectory_counts
from moe_asyncrl.cluster.face import Face, PlainFace
from moe_asyncrl.cluster.launcher import Launcher, LocalLauncher, Role
from moe_asyncrl.cluster.owner import Ownership, RoleLook
from moe_asyncrl.cluster.process import stop_roles, wait_all
from moe_asyncrl.cluster.run_setup import take_up
from moe_asyncrl.cluster.sinks import start_sinks
from moe_asyncrl.cluster.state import close_state, get_state
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.messages import Counters, RunState
from moe_asyncrl.telemetry.figures import duration
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.sinks.feed import Feeds
from moe_asyncrl.telemetry.summary import Summary, TrajectoryCounts, summarize

Outcome = Literal["ok", "failed", "stopped"]

TICK_S = 0.2
TRAINER_STOP_S = 120.0
"""A step, a checkpoint."""
LAST_WORD_S = 2.0
"""Ranks fall one after another: for what the others have to say."""
FINAL_EVAL_S = 600.0
ROLE_STOP_S = 20.0
TIME_IS_UP = signal.SIGUSR2
"""As SIGTERM, but the job's time ends: it may be queued again to go on. Slurm is asked to send it."""
SUPERSEDED = "another supervisor has taken over this run: this one ends and leaves what was written to it"
SINKS_S = 30.0
"""For each of TensorBoard, W&B and MLflow to take the last figures."""


class Supervisor:
    """Owns the role processes of one run."""

    def __init__(
        self,
        folder: RunFolder,
        recipe: Recipe,
        *,
        face: Face | None = None,
        launcher: Launcher | None = None,
        job: str | None = None,
    ) -> None:
        """`face` is what a person sees of the run; lines on standard output if not given.

        `launcher` starts the roles; children of this process if not given. `job` is Slurm's number of this job.
        Raises `UserError` if this machine has too few GPUs for the roles.
        """
        self.folder = folder
        self.recipe = recipe
        self.buffer: Role | None = None
        self.engines: Sequence[Role] = ()
        self.trainers: Sequence[Role] = ()
        self.rollouts: Sequence[Role] = ()
        self.time_is_up = False
        """The run was stopped because the job's time ends."""
        self._launcher: Launcher = launcher if launcher is not None else LocalLauncher(folder, recipe)
        self._job = job
        self._owner: Ownership | None = None
        self._sinks = Feeds([])
        self._face = face if face is not None else PlainFace(folder, recipe)
        self._say = self._face.say
        self._interrupted = 0
        self._lost: set[str] = set()

    def run(self) -> Summary:
        """Run to the end. Returns the summary that was written; raises nothing that a role did wrong.

        If another supervisor takes the run, that is said in the summary returned, and nothing is written.
        Raises `UserError` if a supervisor on this machine is at work on the run already.
        """
        started = time.time()
        clock = time.monotonic()
        self._owner = Ownership.claim(self.folder, job=self._job, say=self._say)
        if self.recipe.run.resume:
            take_up(self.folder, self.recipe)
        # A resumed run must not be taken for what its last start came to.
        slurm = [self.folder.slurm_json] if self._job is None else []
        for old in (*self.folder.logs.glob("*.error"), self.folder.summary, *slurm):
            old.unlink(missing_ok=True)
        self._sinks = start_sinks(self.folder, self.recipe)
        handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM, TIME_IS_UP)}
        outcome: Outcome = "failed"
        error: str | None = None
        try:
            self._start()
            outcome, error = self._watch()
        finally:
            if outcome == "failed" and error is None:
                error = "the supervisor itself failed; its traceback is above"
            summary = self._end(outcome, error, started=started, seconds=lambda: time.monotonic() - clock)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return summary

    # --- start ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        reinforcement = self.recipe.algorithm.objective == "grpo"
        self._say(f"run {self.folder.path}")
        self.buffer = self._launcher.buffer()
        if reinforcement:
            self.engines = self._launcher.engines()
        self.trainers = self._launcher.trainers()
        if reinforcement:
            self.rollouts = self._launcher.rollouts()

    # --- watch ---------------------------------------------------------------------------------------------------

    def _watch(self) -> tuple[Outcome, str | None]:
        """Follow the run until it ends; (outcome, error)."""
        trainers_done_at: float | None = None
        while True:
            self._face.refresh()
            for line in self._sinks.messages():
                self._say(line)
            assert self._owner is not None
            if self._owner.lost():
                return "failed", SUPERSEDED
            self._owner.show(self._looks())
            if self._interrupted:
                return self._stop_on_request()
            error = self._first_failure()
            if error is not None:
                return "failed", error
            if all(t.exit_code == 0 for t in self.trainers):
                trainers_done_at = trainers_done_at if trainers_done_at is not None else time.monotonic()
                if all(r.exit_code == 0 for r in self.rollouts):
                    return "ok", None
                if time.monotonic() - trainers_done_at > FINAL_EVAL_S:
                    return "failed", f"the final evaluation did not end within {duration(FINAL_EVAL_S)}"
            time.sleep(TICK_S)

    def _first_failure(self) -> str | None:
        """Why the run cannot go on, or None. A lost engine is no reason while another one is alive."""
        assert self.buffer is not None
        ended = [t for t in self.trainers if t.exit_code not in (None, 0)]
        if ended:
            # The one that left a word of its own knows why.
            wait_all(self.trainers, LAST_WORD_S)
            ended = [t for t in self.trainers if t.exit_code not in (None, 0)]
            named = [t for t in ended if t.own_word]
            killed = [t for t in ended if (t.exit_code or 0) < 0]
            return self._with_engine((killed or named or ended)[0].error())
        for role in self.rollouts:
            if role.exit_code not in (None, 0):
                return self._with_engine(role.error())
        if self.buffer.exit_code is not None:
            return self.buffer.error()
        dead = [e for e in self.engines if e.exit_code is not None]
        for e in dead:
            if e.name not in self._lost:
                self._lost.add(e.name)
                self._say(f"lost: {e.error()}")
        if dead and len(dead) == len(self.engines):
            return dead[-1].error()
        return None

    def _with_engine(self, error: str) -> str:
        """A trainer or rollout that fails because the last engine died should say so."""
        if self.engines and wait_all(self.engines, 0.0):
            return self.engines[-1].error()
        return error

    def _stop_on_request(self) -> tuple[Outcome, str | None]:
        self._say("stopping: the trainer finishes its step and writes a checkpoint (interrupt again to stop at once)")
        for t in self.trainers:
            t.ask_to_stop()
        deadline = time.monotonic() + TRAINER_STOP_S
        while any(t.exit_code is None for t in self.trainers):
            if self._interrupted > 1:
                return "stopped", "interrupted twice: stopped at once, without a checkpoint"
            if time.monotonic() > deadline:
                return "failed", f"the trainer did not stop within {duration(TRAINER_STOP_S)}"
            if any(t.exit_code not in (None, 0) for t in self.trainers):
                wait_all(self.trainers, LAST_WORD_S)
                break
            self._face.refresh()
            time.sleep(0.05)
        if any(t.exit_code == -signal.SIGTERM for t in self.trainers):
            return "stopped", None  # it was told before it could listen: there was nothing to save
        bad = [t for t in self.trainers if t.exit_code not in (None, 0)]
        return ("failed", bad[0].error()) if bad else ("stopped", None)

    # --- end -----------------------------------------------------------------------------------------------------

    def _end(self, outcome: Outcome, error: str | None, *, started: float, seconds: Callable[[], float]) -> Summary:
        """Stop what is left and write what the run came to; only stop it, if the run is another one's by now."""
        assert self._owner is not None
        if self._owner.lost(look_now=True):
            self._face.close()
            for role in [*self.rollouts, *self.trainers, *self.engines, *([self.buffer] if self.buffer else [])]:
                role.end()
            self._say(SUPERSEDED)
            return Summary(status="failed", error=SUPERSEDED)
        state = self._final_state()
        self._face.close()
        self._stop_everything()
        close_state(self.folder, failed=outcome == "failed", error=error)
        summary = summarize(
            self.folder, status=outcome, error=error, seconds=seconds(), counts=_counts(state), since=started
        )
        self.folder.write_json(self.folder.summary, summary)
        for line in self._sinks.close(SINKS_S):
            self._say(line)
        self._owner.show(self._looks())
        self._owner.release()
        return summary

    def _final_state(self) -> RunState | None:
        """The run's state for the account, while the buffer still answers."""
        if self.buffer is None or self.buffer.exit_code is not None:
            return None
        return get_state(self.folder, deadline_s=3.0)

    def _stop_everything(self) -> None:
        stop_roles([*self.rollouts, *self.trainers], grace_s=ROLE_STOP_S)
        stop_roles(self.engines, grace_s=ROLE_STOP_S)
        stop_roles([self.buffer] if self.buffer else [], grace_s=ROLE_STOP_S)

    def _looks(self) -> list[RoleLook]:
        """How the roles are, for those who look on."""
        roles = [*([self.buffer] if self.buffer else []), *self.trainers, *self.engines, *self.rollouts]
        return [RoleLook(name=r.name, node=r.node, state=_role_state(r)) for r in roles]

    def _on_signal(self, number: int, frame: object) -> None:
        self._interrupted += 1
        self.time_is_up = self.time_is_up or number == TIME_IS_UP


def _role_state(role: Role) -> str:
    code = role.exit_code
    well = code == 0 or (code == -signal.SIGTERM and role.asked)
    return "running" if code is None else "ended" if well else role.error()


def _counts(state: RunState | None) -> TrajectoryCounts:
    return trajectory_counts(state.counters if state is not None else Counters())
