"""The one command, `moe-asyncrl`. Every import that is not needed for `--help` stands inside its subcommand."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_asyncrl.checkpoint.convert.arguments import add_subcommands
from moe_asyncrl.data.errors import UserError

ROLES = ("trainer", "engine", "rollout", "buffer")


def parser() -> argparse.ArgumentParser:
    """The command line. Each subcommand's function is in `call`."""
    top = argparse.ArgumentParser(
        prog="moe-asyncrl", description="Asynchronous reinforcement learning for mixture-of-experts language models."
    )
    sub = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, call: Callable[[argparse.Namespace], int], help_text: str) -> argparse.ArgumentParser:
        p = sub.add_parser(name, help=help_text, description=help_text)
        p.set_defaults(call=call)
        return p

    p = add("run", _run, "Run a recipe on this machine.")
    p.add_argument("recipe", help="YAML file; see `moe-asyncrl config schema`")
    p.add_argument("overrides", nargs="*", metavar="section.field=value")

    p = add("demo", _demo, "A tiny mixture-of-experts model learns arithmetic, asynchronously, on this machine.")
    p.add_argument("overrides", nargs="*", metavar="section.field=value")

    p = add("tiny-model", _tiny_model, "Write a small random HF checkpoint.")
    p.add_argument("out", help="directory to make")
    p.add_argument("--family", default="qwen3_moe", choices=("qwen3_moe", "qwen3"))
    p.add_argument("--seed", type=int, default=0)

    p = add("eval", _eval, "Greedy accuracy of an HF checkpoint on a prompt file.")
    p.add_argument("recipe", help="YAML file whose model, data.eval, engine and reward are used")
    p.add_argument("overrides", nargs="*", metavar="section.field=value")

    p = add("export", _export, "Write a trainer checkpoint as an HF directory.")
    p.add_argument("run", help="run folder, for example runs/latest")
    p.add_argument("out", help="directory to make")
    p.add_argument("--step", type=int, help="checkpoint to take (default: the newest complete one)")
    p.add_argument(
        "--form",
        choices=("plain", "fp8"),
        default="plain",
        help="`fp8` writes the weights that are FP8 in model.path so again (default: plain)",
    )

    p = add("upcycle", _upcycle, "Make a dense Llama checkpoint into a Mixtral, each expert a noisy copy.")
    p.add_argument("source", help="HF directory of the dense model")
    p.add_argument("out", help="directory to make")
    p.add_argument("--experts", type=int, default=4, help="experts of each layer (default: 4)")
    p.add_argument("--top-k", type=int, default=2, help="experts that a token is routed to (default: 2)")
    p.add_argument(
        "--noise", type=float, default=0.015, help="noise, in standard deviations of a matrix (default: 0.015)"
    )
    p.add_argument("--seed", type=int, default=0)

    p = add("convert", _convert, "Convert checkpoints between HF and Megatron-Core, look at them, compare them.")
    add_subcommands(p)

    p = add("top", _top, "Show how a run stands, now and as it goes on.")
    p.add_argument("run", help="run folder, for example runs/latest; also of a run that is over")
    p.add_argument("--once", action="store_true", help="show it once and end")

    p = add(
        "report", _report, "Write report.html of a run: one page with its figures and charts, in whatever state it is."
    )
    p.add_argument("run", help="run folder, for example runs/latest")
    p.add_argument("--out", help="file to write (default: report.html in the run folder)")

    p = add("trace", _trace, "Write a run's spans and counters as a trace for ui.perfetto.dev.")
    p.add_argument("run", help="run folder, for example runs/latest")
    p.add_argument(
        "--out", help="file to write, compressed if it ends in .gz (default: trace.json.gz in the run folder)"
    )
    p.add_argument("--from", dest="first", metavar="WHEN", help="a step, or seconds since the start such as 30s")
    p.add_argument("--to", dest="last", metavar="WHEN", help="the same")

    p = add("samples", _samples, "Read recorded trajectories of a run, the newest step first.")
    p.add_argument("run", help="run folder, for example runs/latest")
    p.add_argument("--step", type=int, help="only of this step")
    p.add_argument("--group", type=int, metavar="ID", help="only of this group")
    p.add_argument("--limit", type=int, default=8, help="trajectories at most (default: 8)")
    p.add_argument("--tokens", action="store_true", help="each token with its version and log-probability")
    p.add_argument("--json", action="store_true", help="a JSON object a line")

    p = add(
        "mismatch", _mismatch, "Take apart the gap between sampler and trainer. Exits with 1 if a bound does not hold."
    )
    p.add_argument("target", metavar="RUN|CHECKPOINT", help="run folder, or one of its checkpoints to evaluate under")
    p.add_argument("--step", type=int, help="only trajectories of this step")
    p.add_argument("--limit", type=int, default=64, help="trajectories at most, the newest ones (default: 64)")
    p.add_argument("--same-version", action="store_true", help="only tokens that the evaluated weights sampled")
    p.add_argument("--max-kl", type=float, metavar="X", help="bound on the mean k3, nats a token")
    p.add_argument("--max-abs", type=float, metavar="Y", help="bound on the largest difference of log-probabilities")
    p.add_argument("--json", action="store_true", help="all figures as one JSON object")
    p.add_argument("--picture", metavar="FILE", help="write a picture too (SVG)")

    p = add("role", _role, "Run one role of a run (what `run` and Slurm start).")
    p.add_argument("role", choices=ROLES)
    p.add_argument("--run", required=True, metavar="DIR", help="run folder")
    p.add_argument("--index", type=int, help="which engine, rollout worker or trainer rank (a rank: Slurm's or RANK)")
    p.add_argument("--gpus", help="positions among the GPUs that the process may use, or `rank` for its local rank's")
    p.add_argument("--host", help="address that the role listens on, instead of the recipe's")
    p.add_argument("--parent", type=int, help="process whose death ends this one")

    p = add("data", _data, "Show the first prompts as the model will see them.")
    p.add_argument("what", choices=("show",))
    p.add_argument("target", metavar="RECIPE|PATH", help="recipe, or a file, folder or glob of prompts")
    p.add_argument("overrides", nargs="*", metavar="section.field=value", help="of the recipe; field=value beside PATH")
    p.add_argument("--limit", type=int, default=3, metavar="N", help="prompts (default: 3)")
    p.add_argument("--tokenize", action="store_true", help="their tokens too")
    p.add_argument("--eval", action="store_true", help="the held-out prompts instead")

    p = add("weights", _weights, "Show the plan of a recipe's weight updates: who sends what to whom. Nothing is sent.")
    p.add_argument("what", choices=("plan",))
    p.add_argument("recipe", help="YAML file; model.path may also be a file of configs/models")
    p.add_argument("overrides", nargs="*", metavar="section.field=value")
    p.add_argument("--mode", choices=("broadcast", "direct"), default="broadcast", help="default: broadcast")
    p.add_argument("--json", action="store_true", help="the figures as JSON")

    p = add("launch", _launch, "Submit a recipe to Slurm.")
    p.add_argument("recipe", help="YAML file, or `demo`")
    p.add_argument("overrides", nargs="*", metavar="section.field=value")
    p.add_argument(
        "--cluster", required=True, metavar="FILE", help="cluster file, for example configs/clusters/h100.yaml"
    )
    p.add_argument("--dry-run", action="store_true", help="print the job script and its steps; submit nothing")
    p.add_argument("--wait", action="store_true", help="follow the run to its end, with its exit code")

    p = add("supervise", _supervise_job, "Supervise a launched run inside its Slurm job (what the job script starts).")
    p.add_argument("run", help="run folder")

    p = add("status", _status, "How a run stands, here or in Slurm.")
    p.add_argument("run", help="run folder, for example runs/latest")

    p = add("logs", _logs, "What the roles of a run wrote.")
    p.add_argument("run", help="run folder, for example runs/latest")
    p.add_argument("role", nargs="?", help="for example trainer-0; all of them if not given")
    p.add_argument("--lines", type=int, default=20, metavar="N", help="last lines of each log (default: 20)")
    p.add_argument("--follow", action="store_true", help="go on until the run ends")

    p = add("stop", _stop, "Ask a run to write a checkpoint and end, and wait for it.")
    p.add_argument("run", help="run folder, for example runs/latest")
    p.add_argument("--now", action="store_true", help="at once, without a checkpoint")

    p = add("config", _config, "Show a resolved recipe, or the schema of recipes.")
    p.add_argument("what", choices=("show", "schema"))
    p.add_argument("recipe", nargs="?", help="YAML file (for `show`)")
    p.add_argument("overrides", nargs="*", metavar="section.field=value")
    form = p.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON Schema instead of text (for `schema`)")
    form.add_argument("--markdown", action="store_true", help="the document docs/recipe.md (for `schema`)")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    # argparse takes positional arguments that come after an option for unknown ones.
    if rest and hasattr(args, "overrides") and all("=" in word and not word.startswith("-") for word in rest):
        args.overrides = [*args.overrides, *rest]
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    from moe_asyncrl.config.load import RecipeError

    try:
        return int(args.call(args))
    except (UserError, RecipeError) as error:
        print(f"moe-asyncrl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1


def _run(args: argparse.Namespace) -> int:
    from moe_asyncrl.config.load import load_recipe

    return _supervise(load_recipe(args.recipe, args.overrides))


def _supervise(recipe: object) -> int:
    from moe_asyncrl.cluster.face import face_for
    from moe_asyncrl.cluster.launcher import place_here
    from moe_asyncrl.cluster.run_setup import absolute, create_run_folder, find_resumable, preflight
    from moe_asyncrl.cluster.supervisor import Supervisor
    from moe_asyncrl.config.recipe import Recipe

    assert isinstance(recipe, Recipe)
    recipe = absolute(recipe, Path.cwd())
    preflight(recipe)
    place_here(recipe)  # too few GPUs are said before there is a run folder
    folder = find_resumable(recipe) if recipe.run.resume else create_run_folder(recipe)
    return _ended(Supervisor(folder, recipe, face=face_for(folder, recipe)).run(), folder.path)


def _launch(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.slurm.command import launch

    return launch(args.recipe, args.overrides, args.cluster, dry_run=args.dry_run, wait=args.wait)


def _supervise_job(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.slurm.job import supervise

    return _ended(supervise(args.run, os.environ), Path(args.run))


def _status(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.status import status_lines

    print("\n".join(status_lines(args.run)))
    return 0


def _logs(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.logs import show_logs

    show_logs(args.run, args.role, lines=args.lines, follow=args.follow, say=lambda line: print(line, flush=True))
    return 0


def _stop(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.stop import stop_run

    summary = stop_run(args.run, now=args.now, say=lambda line: print(line, flush=True))
    return 0 if summary is None else int(_ended(summary, Path(args.run)) == 1)


def _ended(summary: object, path: Path) -> int:
    """Print how a run ended; its exit code."""
    from moe_asyncrl.telemetry.summary import Summary

    assert isinstance(summary, Summary)
    print(_closing(summary, path), flush=True)
    if summary.status == "failed":
        print(f"moe-asyncrl: {summary.error}", file=sys.stderr)
    return {"ok": 0, "stopped": 130}.get(summary.status, 1)


def _closing(summary: object, path: Path) -> str:
    from moe_asyncrl.telemetry.summary import Summary

    assert isinstance(summary, Summary)
    parts = [f"{summary.status}: {summary.steps} steps in {summary.seconds:.0f} s"]
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        parts.append(f"accuracy {summary.accuracy_before:.3f} -> {summary.accuracy_after:.3f}")
    for name, value, form in (
        ("weight versions", summary.weight_versions, "d"),
        ("replay coverage", summary.replay_coverage, ".4f"),
        ("overlap", summary.overlap, ".2f"),
        ("KL with replay", summary.kl_replay, ".2e"),
        ("without", summary.kl_live, ".2e"),
    ):
        if value is not None:
            parts.append(f"{name} {value:{form}}")
    return ", ".join(parts) + f"\n{path / 'summary.json'}"


def _demo(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.demo import demo_recipe

    return _supervise(demo_recipe(args.overrides))


def _tiny_model(args: argparse.Namespace) -> int:
    from moe_asyncrl.models.tiny import make_tiny_model

    make_tiny_model(Path(args.out), args.family, args.seed)
    print(args.out)
    return 0


def _eval(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.evaluate import evaluate_recipe
    from moe_asyncrl.config.load import load_recipe

    print(evaluate_recipe(load_recipe(args.recipe, args.overrides)))
    return 0


def _export(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.export import export_run

    print(export_run(args.run, args.out, step=args.step, form=args.form))
    return 0


def _upcycle(args: argparse.Namespace) -> int:
    from moe_asyncrl.checkpoint.upcycle import upcycle
    from moe_asyncrl.checkpoint.upcycle_plan import Upcycling

    how = Upcycling(experts=args.experts, top_k=args.top_k, noise=args.noise, seed=args.seed)
    upcycle(args.source, args.out, how)
    print(args.out)
    return 0


def _convert(args: argparse.Namespace) -> int:
    from moe_asyncrl.checkpoint.convert.command import convert_command

    return convert_command(args)


def _top(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.top import top

    return top(args.run, once=args.once)


def _report(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.look_back import report

    print(report(args.run, args.out))
    return 0


def _trace(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.look_back import trace

    print(trace(args.run, args.out, args.first, args.last))
    return 0


def _samples(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.samples import samples

    return samples(args.run, step=args.step, group=args.group, limit=args.limit, tokens=args.tokens, as_json=args.json)


def _mismatch(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.mismatch import Wanted, mismatch

    wanted = Wanted(
        target=args.target,
        step=args.step,
        limit=args.limit,
        same_version=args.same_version,
        max_kl=args.max_kl,
        max_abs=args.max_abs,
        as_json=args.json,
        picture=args.picture,
    )
    return mismatch(wanted)


def _role(args: argparse.Namespace) -> int:
    from moe_asyncrl.cluster.roles import run_role

    if args.parent is not None:
        die_with(args.parent)
    return run_role(args.role, args.run, args.index, gpus=args.gpus, host=args.host)


def _data(args: argparse.Namespace) -> int:
    from moe_asyncrl.rollout.show import show

    for line in show(args.target, args.overrides, limit=args.limit, tokenize=args.tokenize, held_out=args.eval):
        print(line)
    return 0


def _weights(args: argparse.Namespace) -> int:
    from moe_asyncrl.weights.plan_command import show

    for line in show(args.recipe, args.overrides, mode=args.mode, as_json=args.json):
        print(line)
    return 0


def _config(args: argparse.Namespace) -> int:
    if args.what == "schema":
        import json

        from moe_asyncrl.config.schema import json_schema, markdown, reference

        text = json.dumps(json_schema(), indent=2) + "\n" if args.json else markdown() if args.markdown else reference()
        print(text, end="")
        return 0
    from moe_asyncrl.config.load import dump_recipe, load_recipe

    if args.recipe is None:
        raise UserError("config show: name a recipe file")
    print(dump_recipe(load_recipe(args.recipe, args.overrides)), end="")
    return 0


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` dies (Linux), and go at once if it is dead already."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
