"""A supervised run on a terminal: its panel, what is said above it, Ctrl-C, and the screen that it leaves."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from moe_asyncrl.cluster.face import LiveFace, PlainFace, live_console
from moe_asyncrl.cluster.sinks import check_sinks
from moe_asyncrl.cluster.state import close_state
from moe_asyncrl.config.load import load_recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.live_state import read_state, write_state
from tests.cluster.terminal import Screen, Terminal
from tests.system.command import COMMAND
from tests.system.projects import make_project
from tests.telemetry.run_folders import make_run, state, step


def panel(screen: Screen) -> str:
    return "\n".join(line for line in screen.visible() if line[:1] in "╭│╰" and line)


def test_ctrl_c_on_a_live_panel(tmp_path: Path) -> None:
    """Supervised learning, as that needs no engine. The panel goes, what was said stays, the cursor is back."""
    home = make_project(tmp_path / "mine", algorithm={"objective": "sft"}, run={"steps": 100000})
    with Terminal([str(COMMAND), "run", "recipe.yaml"], cwd=home) as terminal:
        terminal.until("a panel", lambda s: "starting" in panel(s), 120)
        terminal.until("steps", lambda s: all(w in panel(s) for w in ("tok/s", "running", "ETA")), 240)
        assert not terminal.screen.cursor_shown
        shown = panel(terminal.screen)
        assert "step " in shown and "/100000" in shown and "loss" in shown and "ETA" in shown and "engine" not in shown
        terminal.interrupt()
        terminal.until("its word", lambda s: any("stopping: the trainer finishes" in line for line in s.all()), 60)
        code = terminal.wait(240)
    lines = [line for line in terminal.screen.all() if line]
    assert code == 130 and terminal.screen.cursor_shown
    assert not any(line[:1] in "╭│╰" for line in lines), lines
    text = "".join(lines)
    in_order = [text.find(part) for part in ("run ", "stopping: ", "/100000  loss ", "stopped: ", "summary.json")]
    assert in_order[0] == 0 and in_order == sorted(in_order), text


def test_lines_above_the_panel(tmp_path: Path) -> None:
    """What the supervisor says stays above, whole, also where it looks like markup or is wider than the terminal."""
    from rich.console import Console

    folder = make_run(tmp_path / "demo-1", [step(1)])
    recipe = load_recipe(folder.recipe)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, color_system=None)
    face = LiveFace(folder, recipe, console)
    face.refresh()
    long = "lost: [bold]engine-1[/bold]: " + "x" * 100
    face.say(long)
    folder.metrics.append({"kind": "eval", "time": 1.0, "version": 2, "accuracy": 0.5, "n": 4, "failed": 0})
    folder.metrics.append(step(2))
    face.refresh()
    screen = Screen(80, 24)
    screen.feed(out.getvalue().replace("\n", "\r\n"))
    lines = screen.all()
    assert lines[0] + lines[1] == long and lines[2].startswith("eval    version    2  accuracy 0.500")
    assert lines[3].startswith("╭─ demo-1") and not screen.cursor_shown
    face.close()
    face.close()
    screen = Screen(80, 24)
    screen.feed(out.getvalue().replace("\n", "\r\n"))
    left = [line for line in screen.all() if line]
    assert screen.cursor_shown and left[3].startswith("step    2/120  reward 0.002") and "╭" not in "".join(left)


def test_no_panel_without_a_terminal_that_can_draw_one(tmp_path: Path) -> None:
    assert live_console(io.StringIO(), "xterm") is None
    folder = make_run(tmp_path, [])
    said: list[str] = []
    face = PlainFace(folder, load_recipe(folder.recipe), say=said.append)
    folder.metrics.append(step(1))
    face.refresh()
    folder.metrics.append(step(2))
    face.close()
    assert [line.split()[1] for line in said] == ["1/120", "2/120"]


@pytest.mark.parametrize("failed", [True, False])
def test_the_state_files_say_how_a_run_ended(tmp_path: Path, failed: bool) -> None:
    folder = make_run(tmp_path, [])
    close_state(folder, failed=failed, error="boom")
    assert not folder.state_json.exists() and not folder.control_json.exists()
    write_state(folder, state())
    close_state(folder, failed=failed, error="boom")
    found = read_state(folder)
    assert found is not None
    assert (found.phase, found.error) == (("failed", "boom") if failed else ("finished", None))


def test_a_sink_that_is_not_installed_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path, [])
    recipe = load_recipe(folder.recipe, ["telemetry.wandb=project", "telemetry.mlflow=sqlite:///x.db"])
    check_sinks(recipe)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    with pytest.raises(UserError) as caught:
        check_sinks(recipe)
    assert str(caught.value) == (
        "telemetry.mlflow: the package mlflow is not installed; "
        "install it (pip install mlflow) or set telemetry.mlflow=null"
    )
