"""Figures of a run in TensorBoard, W&B and MLflow: each step once, read back with their own readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.sinks.feed import Feed, FeedThread, Position
from moe_asyncrl.telemetry.sinks.mlflow import MlflowSink
from moe_asyncrl.telemetry.sinks.points import NOT_FIGURES, Point, Points
from moe_asyncrl.telemetry.sinks.tensorboard import TensorBoardSink
from moe_asyncrl.telemetry.sinks.wandb import WandbSink
from tests.telemetry.run_folders import NOW, make_run, step

WARMUP = [{"kind": "warmup", "time": NOW, "step": n, "of": 3, "loss": 1 / n} for n in (1, 2, 3)]
ROLLOUT = {"kind": "rollout", "time": NOW, "sampled_tokens_per_s": 77.0, "reward_mean": None}


def evaluation(version: int, accuracy: float) -> dict[str, Any]:
    return {"kind": "eval", "time": NOW, "version": version, "accuracy": accuracy, "n": 9}


def bring(folder: RunFolder) -> None:
    """A whole life of the TensorBoard sink: everything that is there, then its end."""
    feed = Feed(folder, TensorBoardSink(folder.tensorboard))
    while feed.step():
        pass
    feed.close()


def scalars(folder: RunFolder, place: str = "run") -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder.tensorboard / place), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return {tag: [(s.step, s.value) for s in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected(records: list[dict[str, Any]], kind: str, group: str, axis: str) -> dict[str, list[tuple[int, float]]]:
    """What metrics say: of steps that were done twice, the second time."""
    found: dict[str, dict[int, float]] = {}
    for m in [m for m in records if m["kind"] == kind]:
        for name, value in m.items():
            if name not in NOT_FIGURES and isinstance(value, int | float):
                found.setdefault(f"{group}/{name}", {})[m[axis]] = pytest.approx(float(value))  # events are float32
    return {tag: list(values.items()) for tag, values in found.items()}


def test_events_are_the_metrics(tmp_path: Path) -> None:
    records = [*WARMUP, evaluation(0, 0.25), step(1), ROLLOUT, step(2), step(3), evaluation(3, 0.5)]
    folder = make_run(tmp_path, records)
    bring(folder)
    found = scalars(folder)
    assert found.pop("rollout/sampled_tokens_per_s") == [(2, 77.0), (3, 77.0)]
    assert found == expected(records, "step", "train", "step") | expected(records, "eval", "eval", "version")
    assert scalars(folder, "warmup") == expected(records, "warmup", "warmup", "step")
    events = EventAccumulator(str(folder.tensorboard / "run"), size_guidance={"histograms": 0})
    events.Reload()
    histograms = events.Histograms("train/staleness")
    assert [h.step for h in histograms] == [1, 2, 3]
    last = histograms[-1].histogram_value
    assert (last.bucket, last.bucket_limit) == ([3, 0, 3], [0.5, 1.5, 2.5])
    assert (last.min, last.max, last.num, last.sum, last.sum_squares) == (0, 2, 6, 6, 12)


def test_a_late_start_and_a_resume_bring_each_step_once(tmp_path: Path) -> None:
    first = [*WARMUP, evaluation(0, 0.25), *[step(n) for n in range(1, 8)], evaluation(4, 0.5)]
    folder = make_run(tmp_path, first)
    bring(folder)
    bring(folder)  # nothing is new
    again = [evaluation(4, 0.5), *[step(n, reward=9.0 + n) for n in range(5, 11)], evaluation(8, 0.75)]
    for record in again:
        folder.metrics.append(record)
    bring(folder)
    found = scalars(folder)
    both = expected([*first, *again], "step", "train", "step") | expected([*first, *again], "eval", "eval", "version")
    assert found == both
    assert [s for s, _ in found["train/reward"]] == list(range(1, 11)) and found["train/reward"][4] == (5, 14.0)
    assert scalars(folder, "warmup") == expected(first, "warmup", "warmup", "step")


@pytest.mark.parametrize("lost", ["position", "part of it"])
def test_a_death_before_the_position_was_kept(tmp_path: Path, lost: str) -> None:
    folder = make_run(tmp_path, [step(1), step(2)])
    bring(folder)
    kept = (tmp_path / "sinks" / "tensorboard.json").read_bytes()
    for n in (3, 4):
        folder.metrics.append(step(n))
    bring(folder)
    if lost == "position":
        (tmp_path / "sinks" / "tensorboard.json").unlink()
    else:
        (tmp_path / "sinks" / "tensorboard.json").write_bytes(kept)
    folder.metrics.append(step(5))
    bring(folder)
    assert scalars(folder) == expected([step(n) for n in range(1, 6)], "step", "train", "step")


BAD: list[dict[str, Any]] = [
    {"kind": "step"},
    {"kind": "step", "step": "three", "time": NOW},
    {"kind": "step", "step": -1, "time": NOW},
    {"kind": "step", "step": True, "time": NOW},
    {"kind": "step", "step": 3, "time": None},
    {"kind": 5, "step": 3, "time": NOW},
    {"kind": "unheard of", "step": 3, "time": NOW},
    {},
]


def test_bad_records_change_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [step(1)])
    for record in BAD:
        folder.metrics.append(record)
    with folder.metrics_path.open("ab") as f:
        f.write(b"rubbish\n[]\n\xff\n")
    folder.metrics.append(step(2, reward=None, loss="much", staleness_histogram=[1, "x"], flip_rate=float("nan")))
    bring(folder)
    found = scalars(folder)
    assert [s for s, _ in found["train/tokens"]] == [1, 2] and [s for s, _ in found["train/loss"]] == [1]
    assert all(Points().of(record) is None for record in BAD)


class Failing(TensorBoardSink):
    """A sink whose third write fails."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.points = 0

    def write(self, point: Point) -> None:
        self.points += 1
        if self.points == 3:
            raise OSError("the disk\nis full")
        super().write(point)


def test_a_sink_that_fails_says_so_once_and_stops(tmp_path: Path) -> None:
    folder = make_run(tmp_path, [step(n) for n in range(1, 6)])
    thread = FeedThread(folder, "tensorboard", lambda: Failing(folder.tensorboard), poll_s=0.01)
    messages = thread.close(30)
    assert messages == ["tensorboard: no more figures go there: OSError: the disk is full"]
    assert thread.messages() == []


def no_library() -> TensorBoardSink:
    raise SystemExit("a library that leaves the process")


@pytest.mark.parametrize("make", [no_library, lambda: 1 / 0])
def test_a_sink_that_cannot_begin_says_so(tmp_path: Path, make: Callable[[], Any]) -> None:
    (message,) = FeedThread(make_run(tmp_path, []), "wandb", make, poll_s=0.01).close(30)
    assert message.startswith("wandb: no more figures go there: ")


def test_mlflow_holds_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of files, which MLflow wants to be allowed; the real client reads it back."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "store").as_uri()
    folder = make_run(tmp_path / "demo-1", [step(1), step(2), evaluation(2, 0.5)])
    for record in (step(2, reward=99.0), step(3)):  # as after a resume: what is there stays, what is new comes
        feed = Feed(folder, MlflowSink(uri, "demo", folder.path.name))
        feed.step()
        feed.close()
        folder.metrics.append(record)
    feed = Feed(folder, MlflowSink(uri, "demo", folder.path.name))
    feed.step()
    feed.close()
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("demo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo-1", "FINISHED")
    rewards = sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/reward"))
    assert rewards == [(n, step(n)["reward"]) for n in (1, 2, 3)]
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "eval/accuracy")] == [(2, 0.5)]


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of W&B's offline file: LevelDB's log format (blocks of 32 KiB) behind a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_holds_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: what its library wrote, by its own messages."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    from wandb.proto import wandb_internal_pb2

    folder = make_run(tmp_path / "demo-1", [*WARMUP, step(1), step(2), evaluation(2, 0.5)])
    feed = Feed(folder, WandbSink(folder.path, "project", {"run": {"steps": 2}}))
    feed.step()
    feed.close()
    (path,) = folder.path.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    steps = [row for row in rows if "train/reward" in row]
    assert [(r["policy_step"], r["train/reward"]) for r in steps] == [(n, step(n)["reward"]) for n in (1, 2)]
    assert [r["warmup/loss"] for r in rows if "warmup/loss" in r] == [1, 0.5, 1 / 3]
    assert [(r["policy_step"], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r] == [(2, 0.5)]
    assert steps[-1]["train/staleness.values"] == [2, 0, 3]
    assert Position(offset=1).identity == ""
