"""Every command of the documents: run here on a user's finished run, or by another test that is named here.

A command that is neither fails, so that nobody is told to type what nobody has tried.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from moe_asyncrl.cli import main, parser
from moe_asyncrl.cluster.demo import recipe_path
from moe_asyncrl.config.load import load_recipe
from moe_asyncrl.config.recipe import Recipe
from tests.system.command import metrics
from tests.system.documented import DOCUMENTS, ROOT, Documented, everywhere, fenced, spans
from tests.system.user_run import Done

LOOKING = ("config", "data", "tiny-model", "report", "trace", "samples", "top", "status", "logs", "weights")
"""Subcommands that are cheap enough to be run here, on the finished run."""
USER_RUN = "tests/system/test_user_run.py::test_it_ends_well_and_says_so"
EXPORT = "tests/system/test_user_run.py::test_export_and_evaluation"
DEMO = "tests/slurm/test_launched_demo.py::test_it_ends_well_and_leaves_nothing"
DRY_RUN = "tests/slurm/test_refusals.py::test_a_dry_run_prints_script_and_steps_and_asks_nothing"
ELSEWHERE = {
    "moe-asyncrl demo run.steps=20": DEMO,
    "moe-asyncrl run my-recipe.yaml optimizer.lr=2e-6": USER_RUN,
    "moe-asyncrl run my-recipe.yaml run.resume=true": (
        "tests/system/test_whole_run_broken_off.py::test_no_step_is_missing_in_a_run_that_was_resumed"
    ),
    "moe-asyncrl export runs/latest trained": EXPORT,
    "moe-asyncrl eval my-recipe.yaml model.path=trained": EXPORT,
    "moe-asyncrl launch my-recipe.yaml --cluster my-cluster.yaml --wait": DEMO,
    "moe-asyncrl launch my-recipe.yaml --cluster my-cluster.yaml": (
        "tests/slurm/test_jobs_that_end.py::test_stop_writes_a_checkpoint_and_ends_the_job"
    ),
    "moe-asyncrl launch RECIPE --cluster configs/clusters/h100.yaml --dry-run": DRY_RUN,
    "moe-asyncrl launch RECIPE --cluster configs/clusters/h100.yaml optimizer.lr=2e-6": (
        "tests/slurm/test_values.py::test_the_example_clusters_make_whole_scripts"
    ),
    "moe-asyncrl upcycle my-llama my-mixture --top-k 2": "tests/checkpoint/test_upcycle.py::test_the_command",
    **dict.fromkeys(
        (
            "moe-asyncrl convert hf-to-megatron my-model my-checkpoint",
            "moe-asyncrl convert megatron-to-hf my-checkpoint my-model-again",
            "moe-asyncrl convert megatron-to-hf my-megatron-run my-trained-model --config my-model",
            "moe-asyncrl convert inspect my-checkpoint",
            "moe-asyncrl convert verify my-model my-checkpoint",
            "moe-asyncrl convert diff my-checkpoint my-model-again",
        ),
        "tests/checkpoint/convert/test_command.py::test_the_commands_of_the_document",
    ),
    **dict.fromkeys(
        (
            "moe-asyncrl mismatch runs/latest",
            "moe-asyncrl mismatch runs/latest --same-version --max-kl 1e-3 --max-abs 0.5 --picture gap.svg",
        ),
        "tests/system/test_mismatch.py::test_a_run_taken_apart",
    ),
    "moe-asyncrl mismatch runs/latest/checkpoints/step-00000040": (
        "tests/system/test_mismatch.py::test_a_checkpoint_and_a_bound_that_does_not_hold"
    ),
    "moe-asyncrl stop runs/latest": ("tests/slurm/test_refusals.py::test_status_and_stop_of_a_run_on_this_machine"),
}
"""Commands that start a run or a job: the test that runs the same with other names."""
TARGETS = {
    "setup": "tests/test_house.py::test_locked_versions_are_the_installed_ones",
    "setup-trl": "",
    "demo": DEMO,
    "test": "",
    "lint": "",
    "format": "",
    "bench": "",
    "soak": "",
    "lock": "tests/test_house.py::test_locks_satisfy_their_sources",
    "gpu-check": "tests/cluster/test_gpu_check.py::test_without_a_gpu_each_path_has_its_line",
    "help": "",
}
"""Targets of the Makefile: a test of what they run, where there is one. All of them are read by make itself."""
FENCED = everywhere(fenced)
SPANS = everywhere(spans)


def ours(commands: list[Documented], program: str) -> list[Documented]:
    return [c for c in commands if c.words[0] == program]


def named(commands: list[Documented]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("command", commands, ids=[f"{c.place} {c.text}" for c in commands])


@pytest.fixture
def home(done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the documents speak of it: a recipe and prompts of one's own, the project's examples, and a run."""
    for name in ("configs", "model", "rewards.py", "train.jsonl", "held-out.jsonl", "runs"):
        (tmp_path / name).symlink_to(ROOT / name if name == "configs" else done.home / name)
    shutil.copy(done.home / "recipe.yaml", tmp_path / "my-recipe.yaml")
    shutil.copy(ROOT / "configs" / "clusters" / "one-machine.yaml", tmp_path / "my-cluster.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- what is there is found


def test_commands_are_found_in_blocks_and_in_the_text() -> None:
    text = (
        "Then `make help` or `x`.\n```\na picture\nmake demo   # starts\n```\n  ```sh\n  $ ls -l \\\n     -a\n  ```\n"
        "```python\nmake = 1\n```\n"
    )
    assert [c.text for c in fenced(text)] == ["make demo", "ls -l -a"]
    assert [c.text for c in spans(text)] == ["make help"]
    assert len(FENCED) >= 30 and len(SPANS) >= 20


def test_every_command_is_run_by_a_test() -> None:
    """Here, or where the tables say; and the tables hold nothing that no document says any more."""
    unknown = []
    for command in FENCED:
        program, *rest = command.words
        known = (
            command.text in ELSEWHERE
            or (program == "moe-asyncrl" and rest and (rest[0] in LOOKING or "--dry-run" in rest))
            or (program == "make" and rest[0] in TARGETS)
            or program in ("tensorboard", "prometheus", "source", "cp")
            or (program == "python" and rest[0] == "-m")
        )
        if not known:
            unknown.append(f"{command.place}: {command.text}")
    assert unknown == [], "run it here, or name the test that does in ELSEWHERE"
    assert set(ELSEWHERE) <= {c.text for c in FENCED}


# The names of files stay out of the ids: the chain of broken runs starts where it finds its own file's name in one.
@pytest.mark.parametrize(
    "test",
    sorted({t for t in (*ELSEWHERE.values(), *TARGETS.values()) if t}),
    ids=lambda test: test.rpartition("::")[2],
)
def test_the_named_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    functions = [n for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.FunctionDef)]
    (found,) = [f for f in functions if f.name == name]
    assert not any("skip" in ast.unparse(d) or "xfail" in ast.unparse(d) for d in found.decorator_list)


# ---- moe-asyncrl


@named([c for c in ours(FENCED, "moe-asyncrl") if c.text not in ELSEWHERE])
def test_it_runs_as_it_is_written(command: Documented, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(command.words[1:]) == 0
    out, err = capfd.readouterr()
    assert out and err == ""


@named([c for c in ours(FENCED, "moe-asyncrl") if c.text in ELSEWHERE])
def test_what_is_run_elsewhere_has_options_and_fields_that_exist(command: Documented, home: Path) -> None:
    args, rest = parser().parse_known_args(command.words[1:])
    overrides = [*getattr(args, "overrides", ()), *rest]
    assert all("=" in word and not word.startswith("-") for word in rest)
    recipe = getattr(args, "recipe", "demo")
    load_recipe(Path(recipe) if recipe == "my-recipe.yaml" else recipe_path("demo"), overrides)


@named(ours(SPANS, "moe-asyncrl"))
def test_a_command_in_the_text_can_be_parsed(command: Documented, capfd: pytest.CaptureFixture[str]) -> None:
    """Without arguments it is a subcommand's name; `a|b` means one of them."""
    words = command.text.partition(" > ")[0].split()[1:]
    words = [word.partition("|")[0] for word in words]
    try:
        parser().parse_known_args(words if len(words) > 1 else [*words, "--help"])
    except SystemExit as end:
        assert end.code == 0, capfd.readouterr().err


# ---- make, python, and what others provide


@named([*ours(FENCED, "make"), *ours(SPANS, "make")])
def test_make_knows_the_target(command: Documented) -> None:
    """Read by make, without running it; each program of the project that it would run is there."""
    words = shlex.split(re.sub(r"=<\w+>", "=there", command.text))
    assert words[1] in TARGETS
    said = subprocess.run(
        ["make", "--no-print-directory", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert said.returncode == 0 and said.stdout and said.stderr == "", said
    for program in re.findall(r"(?:^|[ @])((?:\.venv/bin|scripts)/[\w./-]+)", said.stdout):
        assert (ROOT / program).exists(), program


@named([*ours(FENCED, "python"), *ours(SPANS, "python")])
def test_a_module_is_there_and_has_these_options(command: Documented) -> None:
    """Looked up in its source: importing what a benchmark needs takes longer than all else here."""
    _, flag, module, *options = command.words
    assert flag == "-m"
    found = importlib.util.find_spec(module.removesuffix(".NAME"))
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text()
    assert all(f'"{word}"' in source for word in options)


@named([c for c in ours(SPANS, "pip") if c.words[1] == "install"])
def test_a_package_to_install_is_one_that_the_tests_use(command: Documented) -> None:
    assert all(importlib.util.find_spec(name) is not None for name in command.words[2:])


@named([*ours(FENCED, "source"), *ours(FENCED, "cp")])
def test_the_shell_does_it(command: Documented, tmp_path: Path) -> None:
    for name in (".venv", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = f"set -e; {command.text}; command -v moe-asyncrl || true"
    environment = {"PATH": "/usr/bin:/bin"}
    said = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30
    )
    assert said.returncode == 0 and said.stderr == "", said
    if command.words[0] == "source":
        assert said.stdout.strip().endswith("bin/moe-asyncrl")
    else:
        assert (tmp_path / command.words[-1]).is_file()


@contextlib.contextmanager
def serving(words: list[str], log: Path, address: str) -> Iterator[str]:
    """A server that says in its output where it listens (`address` is the pattern); ended afterwards."""
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        end = time.monotonic() + 90
        while not (found := re.search(address, log.read_text(errors="replace"))):
            assert process.poll() is None and time.monotonic() < end, log.read_text(errors="replace")
            time.sleep(0.2)
        yield f"http://{found[1]}"
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
        for child in psutil.wait_procs(children, timeout=5)[1]:
            child.kill()


def ask(url: str, good: Callable[[str], bool]) -> None:
    """Until the answer is a good one, for at most 60 seconds."""
    end = time.monotonic() + 60
    said = ""
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
            said = reply.read().decode()
            if good(said):
                return
        time.sleep(0.3)
    raise AssertionError(f"{url}: {said[:2000]}")


@named(ours(FENCED, "tensorboard"))
def test_tensorboard_shows_the_run(command: Documented, home: Path) -> None:
    program = Path(sys.executable).with_name("tensorboard")
    words = [str(program), *command.words[1:], "--port", "0", "--load_fast", "false"]
    with serving(words, home / "log", r"http://([\w.-]+:\d+)/") as url:
        ask(f"{url}/data/plugin/scalars/tags", lambda said: "train/reward" in said)


@named(ours(FENCED, "prometheus"))
def test_prometheus_takes_the_configuration(command: Documented, home: Path) -> None:
    words = [*command.words, "--web.listen-address", "127.0.0.1:0", "--storage.tsdb.path", str(home / "tsdb")]
    with serving(words, home / "log", r'Listening on"? .*?(?:address|Address)=(127\.0\.0\.1:\d+)') as url:
        ask(f"{url}/api/v1/targets", lambda said: '"status":"success"' in said)
        ask(f"{url}/api/v1/status/config", lambda said: "runs/latest/endpoints/prometheus" in said)


# ---- the names in the text


def test_documents_name_fields_of_the_recipe_that_exist() -> None:
    """`section.field`, but for names of files such as `rewards.py`."""
    sections = {
        s.name: {f.name for f in msgspec.structs.fields(s.type)}
        for s in msgspec.structs.fields(Recipe)
        if isinstance(s.type, type)
    }
    wrong = []
    for path in DOCUMENTS:
        for section, name in re.findall(r"`(\w+)\.(\w+)(?:[:=][^`]*)?`", path.read_text()):
            if section in sections and name not in sections[section] and name not in ("yaml", "py", "json"):
                wrong.append(f"{path.name}: {section}.{name}")
    assert wrong == []


def test_the_numbers_that_tell_are_measured(done: Done) -> None:
    """Every name in the second column of the table of symptoms is one that a run writes down."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = re.findall(r"^\|([^|]+)\|([^|]+)\|([^|]+)\| \[", text, re.MULTILINE)
    names = {name for row in table for name in re.findall(r"`(\w+)`", row[1])} - {"probe", "rollout"}
    records = metrics(done.folder)
    written = {name for record in records for name in record} | {"status", "error"}
    assert len(names) >= 14 and names <= written, names - written
    anchors = re.findall(r"\]\(#([\w-]+)\)", text)
    headings = {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^## (.+)$", text, re.M)
    }
    assert set(anchors) <= headings, set(anchors) - headings
