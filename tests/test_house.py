"""The rules of the house: small files, no traces of a machine, locks that fit, documents that name real commands."""

import ast
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import moe_asyncrl

ROOT = Path(__file__).resolve().parent.parent
TEXT = {".py", ".md", ".sh", ".in", ".txt", ".toml", ".yaml", ".yml", ".cfg", ".ini", ".json", ".sbatch", ".j2", ""}
LONGEST_FILE = 500
SOURCES = ("cpu.in", "dev.in", "cpu-nodeps.in", "dev-nodeps.in")


def project_files() -> list[Path]:
    """Every text file of the project: what git tracks or would track; without git, all but the ignored folders."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        paths = [ROOT / name for name in names]
    else:
        skip = {".venv", ".venv-trl", ".git", "runs", "build", "dist", "__pycache__"}
        paths = [p for p in ROOT.rglob("*") if not skip & set(p.relative_to(ROOT).parts)]
    return sorted(p for p in paths if p.suffix in TEXT and p.is_file())


def is_binary(data: bytes) -> bool:
    return b"\0" in data


# ---- small rooms


def test_no_code_file_is_longer_than_a_person_reads_at_once() -> None:
    long = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in project_files() if p.suffix in {".py", ".sh"}
    }
    assert {name: lines for name, lines in long.items() if lines > LONGEST_FILE} == {}


def test_no_module_of_ours_unpickles() -> None:
    """ruff bans the imports; this catches torch.load without weights_only and numpy's allow_pickle."""
    found = []
    for path in [p for p in project_files() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] == "moe_asyncrl"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
                wrong = (node.arg, node.value.value) in {("weights_only", False), ("allow_pickle", True)}
                if wrong:
                    found.append(f"{path.relative_to(ROOT)}:{node.value.lineno} {node.arg}={node.value.value}")
    assert found == []


# ---- no traces of a machine

# Put together from pieces so that this file does not find itself.
MACHINE_PATHS = re.compile(
    "(?<![\\w.$}~-])/(?:" + "|".join(["work", "root", "home/[a-z]", "Users", "tmp/[\\w.]"]) + ")(?![\\w-])"
)
REGISTRY_HOSTS = re.compile(
    "|".join(["pypi" + r"\.org", "pythonhosted" + r"\.org", "download" + r"\.pytorch", "--extra" + "-index-url"])
)


def hits(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in project_files():
        data = path.read_bytes()
        if is_binary(data) or path.name == "LICENSE":
            continue
        for number, line in enumerate(data.decode().splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    return found


def test_no_path_of_a_machine_is_written_down() -> None:
    assert hits(MACHINE_PATHS) == []


def test_no_registry_host_is_written_down() -> None:
    assert hits(REGISTRY_HOSTS) == []


def test_the_patterns_for_traces_see_them() -> None:
    planted = "/" + "work/main"
    assert MACHINE_PATHS.search(f"cd {planted} && ls")
    assert not MACHINE_PATHS.search("docs/work/plan.md and $HOME/work/x")
    assert REGISTRY_HOSTS.search("https://pypi" + ".org/simple")


# ---- dependencies


def setup_arguments() -> dict[str, Any]:
    """What setup.py hands to setuptools, read by running it with `setup` replaced."""
    with mock.patch("setuptools.setup") as setup:
        here = os.getcwd()
        os.chdir(ROOT)
        try:
            runpy.run_path(str(ROOT / "setup.py"))
        finally:
            os.chdir(here)
    return dict(setup.call_args.kwargs)


def requirement_lines(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def locked() -> dict[str, Version]:
    """Canonical name → version over the locks; a line that is not `name==version`, or a second version, fails."""
    versions: dict[str, Version] = {}
    for name in ("cpu.txt", "dev.txt", "cpu-nodeps.txt", "dev-nodeps.txt"):
        for requirement in requirement_lines(name):
            (pin,) = list(requirement.specifier)
            assert pin.operator == "==", f"{name}: {requirement} is not an exact version"
            key = canonicalize_name(requirement.name)
            assert key not in versions, f"{name}: {key} is locked twice"
            versions[key] = Version(pin.version)
    return versions


@pytest.mark.parametrize("source", SOURCES)
def test_locks_satisfy_their_sources(source: str) -> None:
    versions = locked()
    for requirement in requirement_lines(source):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), str(requirement)


def test_locks_satisfy_the_ranges_of_setup_py() -> None:
    arguments, versions = setup_arguments(), locked()
    declared = [
        *arguments["install_requires"],
        *arguments["extras_require"]["cpu"],
        *arguments["extras_require"]["dev"],
    ]
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), str(requirement)
    sglang = next(r for r in map(Requirement, arguments["extras_require"]["cluster"]) if r.name == "sglang")
    assert sglang.specifier.contains(versions["sglang"])


def test_locked_versions_are_the_installed_ones() -> None:
    wrong = {}
    for name, version in locked().items():
        installed = Version(Version(importlib.metadata.version(name)).public)
        if installed != version:
            wrong[name] = (str(version), str(installed))
    assert wrong == {}, "run `make setup`, or `make lock` where a requirement changed"


def test_no_declared_package_is_another_one_of_the_same_name() -> None:
    """`apex` is a web toolkit, `zmq` a stub, `sgl-kernel` CUDA-only; torchvision and triton break the CPU install."""
    arguments = setup_arguments()
    declared = [*arguments["install_requires"], *(r for extra in arguments["extras_require"].values() for r in extra)]
    names = {canonicalize_name(Requirement(r).name) for r in declared} | set(locked())
    assert names & {"apex", "zmq", "sgl-kernel", "torchvision", "triton"} == set()


def test_every_dependency_has_its_reason() -> None:
    """docs/dependencies.md has one row for each package that setup.py or an .in file names, and no other."""
    text = (ROOT / "docs" / "dependencies.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    assert all(reason.strip() for _, reason in rows)
    explained = [str(canonicalize_name(name)) for name, _ in rows]
    assert len(explained) == len(set(explained))
    arguments = setup_arguments()
    named = {Requirement(r).name for r in arguments["install_requires"]}
    named |= {Requirement(r).name for extra in arguments["extras_require"].values() for r in extra}
    named |= {r.name for source in SOURCES for r in requirement_lines(source)}
    assert {str(canonicalize_name(n)) for n in named} == set(explained)


def test_every_module_imported_by_the_package_is_declared() -> None:
    """An import that works here by luck (a dependency of a dependency) is missing on another machine."""
    arguments = setup_arguments()
    declared = {canonicalize_name(Requirement(r).name) for r in arguments["install_requires"]}
    declared |= {
        canonicalize_name(Requirement(r).name)
        for extra in ("cpu", "cluster")
        for r in arguments["extras_require"][extra]
    }
    distributions = importlib.metadata.packages_distributions()
    # Detected, never installed by us: each import of them stands inside a try or behind the capability record.
    detected = {
        "apex",
        "transformer_engine",
        "triton",
        "torchvision",
        "sgl_kernel",
        "fused_weight_gradient_mlp_cuda",
        "amp_C",
        "wandb",
        "mlflow",
    }
    missing = set()
    for path in [
        p
        for p in project_files()
        if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in ("moe_asyncrl", "megatron_patches")
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names}:
                if top in sys.stdlib_module_names or top in detected or top in ("moe_asyncrl", "megatron_patches"):
                    continue
                if not {canonicalize_name(d) for d in distributions.get(top, [])} & declared:
                    missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert missing == set()


# ---- versions and commands


def test_one_version_string() -> None:
    assert setup_arguments()["version"] == moe_asyncrl.__version__
    assert importlib.metadata.version("moe-asyncrl") == moe_asyncrl.__version__, "run `make setup`"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_makefile_has_what_people_expect() -> None:
    assert {"setup", "demo", "test", "bench", "soak", "lint", "gpu-check", "lock", "clean"} <= make_targets()


def test_documents_name_only_targets_that_exist() -> None:
    unknown = []
    for path in [p for p in project_files() if p.suffix == ".md"]:
        for target in re.findall(r"(?:`|^|\$ )make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE):
            if target not in make_targets():
                unknown.append(f"{path.relative_to(ROOT)}: make {target}")
    assert unknown == []


def test_documents_name_only_files_that_exist() -> None:
    """Links of the form [text](path) and code spans that name a file in docs/, requirements/, scripts/ or configs/."""
    missing = []
    for path in [p for p in project_files() if p.suffix == ".md"]:
        text = path.read_text()
        links = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
        missing += [f"{path.relative_to(ROOT)}: {t}" for t in links if t and not (path.parent / t).exists()]
        spans = re.findall(r"`((?:docs|requirements|scripts|configs)/[\w./-]+)`", text)
        missing += [f"{path.relative_to(ROOT)}: {t}" for t in spans if not (ROOT / t).exists()]
    assert missing == []


def test_documents_name_only_commands_that_exist() -> None:
    """`moe-asyncrl WORD` in a document or in the Makefile is a subcommand that --help knows."""
    command = Path(sys.executable).with_name("moe-asyncrl")
    shown = subprocess.run([str(command), "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    unknown = []
    for path in [p for p in project_files() if p.suffix == ".md" or p.name == "Makefile"]:
        for word in re.findall(r"(?:^|`|/|\$ )moe-asyncrl ([a-z][a-z-]*)", path.read_text(), re.MULTILINE):
            if not re.search(rf"\b{re.escape(word)}\b", shown):
                unknown.append(f"{path.relative_to(ROOT)}: moe-asyncrl {word}")
    assert unknown == []


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert setup_arguments()["license"] == "Apache-2.0"


# ---- set-up


def run_setup(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """scripts/setup.sh of a copy that has nothing but its inputs: it must stop before it installs anything."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    command = ["bash", "scripts/setup.sh"]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_setup_says_which_python_is_missing(tmp_path: Path) -> None:
    result = run_setup(tmp_path, PYTHON="python-that-is-not-there")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "setup: no 'python-that-is-not-there' on PATH. Install Python 3.11 with its venv module, "
        "or name one: make setup PYTHON=path/to/python3.11"
    ]


def test_setup_says_when_the_python_is_another_version(tmp_path: Path) -> None:
    fake = tmp_path / "python3.11"
    fake.write_text("#!/bin/sh\necho 3.9\n")
    fake.chmod(0o755)
    result = run_setup(tmp_path, PYTHON=str(fake))
    assert result.returncode == 1
    assert "is Python 3.9; the locks are for 3.11" in result.stderr


def test_setup_says_when_the_machine_is_another_kind(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "uname").write_text('#!/bin/sh\n[ "$1" = -s ] && echo Darwin || echo arm64\n')
    (tools / "uname").chmod(0o755)
    result = run_setup(tmp_path, PATH=f"{tools}:{os.environ['PATH']}")
    assert result.returncode == 1
    assert result.stderr.startswith("setup: this is Darwin on arm64; ")
    assert len(result.stderr.splitlines()) == 1
