"""The commands that the documents tell people to type: those of fenced blocks, and those of code spans in the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAMS = ("moe-asyncrl", "make", "python", "pip", "tensorboard", "prometheus", "source", "cp", "git", "sbatch")
"""What begins a command where a block does not say that it holds commands."""
SHELL = ("sh", "bash", "shell", "console")
FENCE = re.compile(r"^ *```(\w*)\s*$")
SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Documented:
    """A command, and where it stands."""

    text: str
    place: str

    @property
    def words(self) -> list[str]:
        return self.text.split()


def fenced(text: str, name: str = "") -> Iterator[Documented]:
    """Commands in fenced blocks: each line of a shell block, and what begins with a known program in an unnamed one."""
    language: str | None = None
    begun = ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if fence:
            assert not begun, f"{name}:{number}: the block ends in the middle of a command"
            language = fence[1] if language is None else None
            continue
        if language is None or (language and language not in SHELL):
            continue
        line = begun + re.sub(r"(^|\s+)#.*$", "", line).strip().removeprefix("$ ")
        if line.endswith("\\"):
            begun = line[:-1].rstrip() + " "
            continue
        begun = ""
        if line and (language in SHELL or line.split()[0] in PROGRAMS):
            yield Documented(" ".join(line.split()), f"{name}:{number}")


def spans(text: str, name: str = "") -> Iterator[Documented]:
    """Commands in code spans outside of blocks: what begins with a known program and goes on."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            for span in SPAN.findall(line):
                if span.partition(" ")[0] in PROGRAMS and " " in span:
                    yield Documented(" ".join(span.split()), f"{name}:{number}")


def everywhere(find: Callable[[str, str], Iterator[Documented]]) -> list[Documented]:
    """Every different command that `find` sees in the documents, at its first place."""
    first: dict[str, Documented] = {}
    for path in DOCUMENTS:
        for command in find(path.read_text(), str(path.relative_to(ROOT))):
            first.setdefault(command.text, command)
    return list(first.values())
