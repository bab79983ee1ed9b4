"""Resolve requirements/*.in into the exact locks beside them.

`make lock` runs this. Each lock names every package of the closure with one exact version and nothing else: no hash,
because torch has a CPU build and a CUDA build of one version and the user chooses; no index, because the user's pip
configuration has one.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
HEADER = "# Made by `make lock` from requirements/{source}. Do not edit: change the .in file and lock again.\n"
# What only torch's CUDA build pulls in. It follows from the build that the user picks, so it is not part of the lock.
CUDA_ONLY = re.compile(r"^(nvidia-(?!ml-py$).*|cuda-.*|triton)$")


def canonical(name: str) -> str:
    """The package name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def public_version(version: str) -> str:
    """The version without its local part: `2.13.0+cpu` is `2.13.0`, whichever build was found."""
    return version.partition("+")[0]


def resolve(source: Path, constraints: Path | None, pip_arguments: list[str]) -> dict[str, str]:
    """Ask pip what it would install for `source` in an empty environment: canonical name → exact public version."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "-r", str(source), *pip_arguments]
        if constraints is not None:
            command += ["-c", str(constraints)]
        subprocess.run(command, check=True)
        chosen = json.loads(report.read_text())["install"]
    versions = {canonical(item["metadata"]["name"]): public_version(item["metadata"]["version"]) for item in chosen}
    return {name: version for name, version in versions.items() if not CUDA_ONLY.match(name)}


def write(target: Path, source: Path, versions: dict[str, str]) -> None:
    lines = [f"{name}=={versions[name]}\n" for name in sorted(versions)]
    target.write_text(HEADER.format(source=source.name) + "".join(lines))
    print(f"{target.relative_to(ROOT)}: {len(lines)} packages")


def main(pip_arguments: list[str]) -> None:
    """Write cpu.txt, dev.txt (only what cpu.txt lacks), both -nodeps.txt and trl.txt; `pip_arguments` go to pip."""
    cpu = resolve(REQUIREMENTS / "cpu.in", None, pip_arguments)
    write(REQUIREMENTS / "cpu.txt", REQUIREMENTS / "cpu.in", cpu)
    dev = resolve(REQUIREMENTS / "dev.in", REQUIREMENTS / "cpu.txt", pip_arguments)
    write(REQUIREMENTS / "dev.txt", REQUIREMENTS / "dev.in", {n: v for n, v in dev.items() if n not in cpu})
    for name in ("cpu-nodeps", "dev-nodeps"):
        source = REQUIREMENTS / f"{name}.in"
        write(source.with_suffix(".txt"), source, resolve(source, None, ["--no-deps", *pip_arguments]))
    # The benchmark's peer lives in an environment of its own: nothing of ours constrains it.
    write(REQUIREMENTS / "trl.txt", REQUIREMENTS / "trl.in", resolve(REQUIREMENTS / "trl.in", None, pip_arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
