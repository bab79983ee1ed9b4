"""The panel that a terminal shows of a run: pure, from a `View` and the terminal's size. Needs `rich`."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moe_asyncrl.telemetry.figures import duration, number
from moe_asyncrl.telemetry.view import EngineView, View

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {
    "ok": "green",
    "running": "green",
    "serving": "green",
    "finishing": "green",
    "finished": "green",
    "failed": "bold red",
    "gone": "bold red",
    "quarantined": "bold red",
    "silent": "bold red",
}
"""Of states; what is not listed here is yellow."""
LABEL, VALUE = 9, 9
"""Columns of a figure's name and value."""
SILENT_S = 10.0
"""An engine without a sign of life for longer is shown with its silence."""

Figure = tuple[str, str, tuple[str, ...]]
"""Label, value, and a remark, in forms from the longest to the shortest: the first one that fits is shown."""


def draw(view: View, *, width: int, height: int) -> RenderableType:
    """A panel of `width` columns and at most `height` lines; engines and warnings give way where room is short."""
    columns = 1 if width < 56 else 2 if width < 104 else 3 if width < 150 else 4
    figures = figures_of(view)
    lines = 2 + 1 + -(-len(figures) // columns)
    body: list[RenderableType] = [_bar(view, width - 4), _figures(figures, columns, width - 4)]
    if view.error:
        body.append(Text(view.error, style="bold red", overflow="ellipsis", no_wrap=view.summary is None))
        lines += 1 + len(view.error) // max(1, width - 4)
    room = height - lines - len(view.warnings) - 2
    if view.engines and room >= 1:
        body += [Text(""), _engines(view.engines, room, width - 4)]
        lines += 2 + min(room, len(view.engines))
    for line in view.warnings[max(0, len(view.warnings) - max(0, height - lines)) :]:
        body.append(Text(f"! {line}", style="yellow", overflow="ellipsis", no_wrap=True))
    status = Text(view.status, style=COLOURS.get(view.status, "yellow"))
    return Panel(
        Group(*body),
        title=Text(view.path.name, style="bold"),
        title_align="left",
        subtitle=status,
        subtitle_align="right",
        box=box.ROUNDED,
        width=width,
        padding=(0, 1),
    )


def figures_of(view: View) -> list[Figure]:
    """What the panel tells, in reading order."""
    m, now = view.step, view.state
    if view.status == "warm-up":
        return [
            ("loss", number(view.warmup.get("loss"), ".4f"), ("supervised",)),
            ("train", number(view.warmup.get("trained_tokens_per_s"), ",.0f"), ("tok/s",)),
        ]
    at = view.eval.get("version")
    # The newest state is younger than the newest step.
    held, room = (now.held, now.capacity) if now and not view.over else (m.get("buffer_held"), m.get("buffer_capacity"))
    highest, stood = m.get("staleness_max"), m.get("pause_seconds")
    spark = view.rewards
    figures: list[Figure] = [
        ("reward", number(m.get("reward"), ".3f"), tuple(sparkline(spark, n) for n in (16, 8))),
        ("accuracy", number(view.eval.get("accuracy"), ".3f"), () if at is None else (f"at version {at}", f"at {at}")),
        ("train", number(m.get("trained_tokens_per_s"), ",.0f"), ("tok/s",)),
        ("sample", number(view.rollout.get("sampled_tokens_per_s"), ",.0f"), ("tok/s",)),
        (
            "staleness",
            number(m.get("staleness_mean"), ".2f"),
            () if highest is None else (f"versions, max {highest}", f"max {highest}"),
        ),
        ("buffer", f"{number(held, 'd')}/{number(room, 'd')}", tuple(gauge(held, room, n) for n in (16, 8))),
        ("coverage", number(m.get("coverage"), ".3f"), ("of router rows", "of rows")),
        ("flips", number(m.get("flip_rate"), ".4f"), ("of router decisions", "of decisions")),
        ("KL", number(view.probe.get("kl_replay"), ".1e"), ("with replay", "replay")),
        ("KL live", number(view.probe.get("kl_live"), ".1e"), ("without replay", "without")),
        (
            "update",
            number(m.get("publish_seconds"), ".2f"),
            () if stood is None else (f"s, engines wait {stood:.2f}", f"s, wait {stood:.2f}", "s"),
        ),
        (
            "loss",
            number(m.get("loss"), ".4f"),
            (f"entropy {m['entropy']:.2f}",) if m.get("entropy") is not None else (),
        ),
    ]
    if view.probe.get("load_entropy_sampler") is not None:
        figures.append(("experts", number(view.probe["load_entropy_sampler"], ".3f"), experts_remarks(view)))
    if m and m.get("reward") is None:  # supervised: nothing is sampled
        return [f for f in figures if f[0] in ("loss", "train")]
    return figures if m else [f for f in figures if f[1] not in ("-", "-/-")]


def experts_remarks(view: View) -> tuple[str, ...]:
    """Beside the evenness of the sampler's least even layer: the trainer's, and experts without a token."""
    trainer, idle = view.probe.get("load_entropy_trainer"), view.probe.get("idle_experts_sampler")
    if trainer is None or idle is None:
        return ()
    return (f"even, trainer {trainer:.3f}, {idle} idle", f"even, {idle} idle", "even")


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars from their least to their greatest; empty for fewer than two."""
    last = list(values)[-width:]
    if len(last) < 2:
        return ""
    low, span = min(last), max(last) - min(last)
    return "".join(BARS[round((v - low) / span * (len(BARS) - 1)) if span > 0 else 0] for v in last)


def gauge(held: int | None, capacity: int | None, width: int) -> str:
    """How full the buffer is, as a bar."""
    if held is None or not capacity:
        return ""
    full = round(width * min(1.0, held / capacity))
    return "█" * full + "░" * (width - full)


def _bar(view: View, width: int) -> RenderableType:
    warming = view.status == "warm-up"
    done = int(view.warmup["step"]) if warming else int(view.step.get("step", 0))
    total = int(view.warmup["of"]) if warming else view.total_steps
    if view.over and view.summary is not None:
        took = f"{view.summary.steps} steps in {duration(view.summary.seconds)}"
    elif view.eta_s is not None:
        took = f"ETA {duration(view.eta_s)}"
    else:
        took = ""
    label = f"{'warm-up ' if warming else ''}step {done}/{total}"
    tail = f"{done / total:4.0%}  {took}".rstrip() if width >= 50 else took
    grid = Table.grid(padding=(0, 1), expand=False)
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    room = max(4, width - len(label) - len(tail) - 3)
    grid.add_row(label, ProgressBar(total=max(1, total), completed=done, width=room, pulse=False), tail)
    return grid


def _figures(figures: Sequence[Figure], columns: int, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=False)
    remark = max(1, width // columns - LABEL - VALUE - 3)
    for _ in range(columns):
        grid.add_column(width=LABEL, no_wrap=True, style="cyan")
        grid.add_column(width=VALUE, no_wrap=True, justify="right", style="bold")
        grid.add_column(width=remark, no_wrap=True)
    for i in range(0, len(figures), columns):
        row = []
        for label, value, forms in figures[i : i + columns]:
            row += [label, value, next((form for form in forms if len(form) <= remark), "")]
        grid.add_row(*row, *[""] * (3 * columns - len(row)))
    return grid


def _engines(engines: Sequence[EngineView], room: int, width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="cyan", expand=False)
    table.add_column("engine", no_wrap=True, min_width=9)
    table.add_column("state", no_wrap=True, min_width=11)
    table.add_column("version", no_wrap=True, justify="right")
    if width >= 50:
        table.add_column("last update", no_wrap=True, justify="right")
    if width >= 60:
        table.add_column("tok/s", no_wrap=True, justify="right")
    if width >= 70:
        table.add_column("starts", no_wrap=True, justify="right")
    # Those that are not well come first where not all fit.
    shown = list(engines)
    if len(engines) > room:
        shown = sorted(engines, key=lambda e: e.state == "serving")[: max(1, room - 1)]
    for e in shown:
        table.add_row(*_cells(e)[: len(table.columns)])
    if len(shown) < len(engines):
        rest = [e for e in engines if e not in shown]
        serving = sum(e.state == "serving" for e in rest)
        return Group(table, Text(f"… and {len(rest)} more, {serving} of them serving", style="dim"))
    return table


def _cells(e: EngineView) -> list[str | Text]:
    state = Text(e.state or "-", style=COLOURS.get(e.state or "", "yellow") if e.state else "")
    if e.silent_s is not None and e.silent_s > SILENT_S:
        state = Text(f"silent {duration(e.silent_s)}", style=COLOURS["silent"])
    ago = "-" if e.updated_s is None else f"{duration(e.updated_s)} ago"
    return [e.name, state, number(e.version, "d"), ago, number(e.tokens_per_s, ",.0f"), str(e.starts)]
