"""Who may import whom: the contracts hold, each notices a breach, and light parts start without heavy libraries."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
HEAVY = ("torch", "transformers", "megatron", "sglang")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of the tree in `folder`, which its own .importlinter describes."""
    command = [str(LINT_IMPORTS), "--no-cache", ".importlinter"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages and their contracts, to plant a breach in."""
    shutil.copy(ROOT / ".importlinter", tmp_path)
    for package in ("moe_asyncrl", "megatron_patches"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


BREACHES = [
    ("moe_asyncrl/rollout", "import moe_asyncrl.train", "The layers of the package"),
    ("moe_asyncrl/train", "import moe_asyncrl.rollout", "The layers of the package"),
    ("moe_asyncrl/weights", "import moe_asyncrl.engine", "The layers of the package"),
    ("moe_asyncrl/data", "import moe_asyncrl.models", "The layers of the package"),
    ("moe_asyncrl/rollout", "def late():\n    import sglang", "Only engine imports SGLang"),
    ("moe_asyncrl/weights", "def late():\n    import megatron.core", "Only train, checkpoint and megatron_patches"),
    ("moe_asyncrl/engine", "def late():\n    import transformer_engine", "Only train, checkpoint and megatron_patches"),
    ("moe_asyncrl/control", "def late():\n    import torch", "The ground and control do without torch"),
    ("megatron_patches", "import moe_asyncrl.models", "The patches for Megatron-Core"),
]


@pytest.mark.parametrize(("room", "line", "contract"), BREACHES)
def test_a_planted_breach_is_named(tree: Path, room: str, line: str, contract: str) -> None:
    (tree / room / "planted.py").write_text(line + "\n")
    result = lint_imports(tree)
    assert result.returncode == 1
    broken = [row for row in result.stdout.splitlines() if row.startswith(contract) and "BROKEN" in row]
    # a long name is wrapped, so its verdict may stand on the next row
    assert broken or f"{contract}" in result.stdout.partition("Broken contracts")[2], result.stdout
    assert "planted" in result.stdout


def test_a_new_room_needs_a_layer(tree: Path) -> None:
    (tree / "moe_asyncrl" / "attic").mkdir()
    (tree / "moe_asyncrl" / "attic" / "__init__.py").touch()
    result = lint_imports(tree)
    assert result.returncode == 1
    assert "attic" in result.stdout


def loaded_by(module: str) -> set[str]:
    """Which of the heavy libraries a fresh interpreter holds after importing `module`.

    A fresh process, because this one has long imported them all.
    """
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["cli", "config", "telemetry", "data", "control", "models", "cluster"])
def test_light_parts_start_without_the_heavy_libraries(module: str) -> None:
    """Every module of the ground and of control; of the others, what `moe-asyncrl --help` and the planner load."""
    assert loaded_by(f"moe_asyncrl.{module}") == set()


def test_every_module_of_the_ground_is_light() -> None:
    names = []
    for room in ("config", "telemetry", "data", "control"):
        for path in sorted((ROOT / "moe_asyncrl" / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] not in ("__init__", "__main__"):
                names.append(".".join(parts))
    assert names
    assert loaded_by(", ".join(names)) == set()


def test_the_check_for_heavy_libraries_sees_them() -> None:
    assert "torch" in loaded_by("torch")
