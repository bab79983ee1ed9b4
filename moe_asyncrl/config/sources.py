"""What the sources of a mixture must satisfy, and how they are called. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from moe_asyncrl.config.recipe import Source

ONLY_FILES = ("split", "prompt_field", "messages_field", "answer_field")
ONLY_TASKS = ("config", "size", "seed")


def check_sources(sources: Sequence[Source]) -> tuple[str, str] | None:
    """The first contradiction as (`[number].field`, what is wrong and what to do), or None."""
    names: dict[str, int] = {}
    for i, s in enumerate(sources):
        if (s.path is None) == (s.reasoning_gym is None):
            given = "neither" if s.path is None else "both"
            return f"[{i}]", f"give either `path` or `reasoning_gym`; {given} found"
        kind, others = ("path", ONLY_TASKS) if s.path is not None else ("reasoning_gym", ONLY_FILES)
        plain = Source()
        for field in others:
            if getattr(s, field) != getattr(plain, field):
                return f"[{i}].{field}", f"has no meaning beside `{kind}`; leave it out"
        if (s.chat or s.system is not None or s.instruction is not None) and s.messages_field is not None:
            return f"[{i}]", "`chat`, `system` and `instruction` go around a text, messages_field names a chat"
        if s.reasoning_gym is None and s.reward == "reasoning_gym":
            return f"[{i}].reward", "'reasoning_gym' scores items of reasoning-gym tasks; a path has none"
        name = source_name(s)
        if name in names:
            return f"[{i}]", f"is called {name!r} like source {names[name]}; give one of them another `name`"
        names[name] = i
    return None


def source_name(source: Source) -> str:
    """The name in metrics and trajectories."""
    if source.name is not None:
        return source.name
    if source.reasoning_gym is not None:
        return source.reasoning_gym
    path = PurePath(source.path or "")
    parts = [part for part in path.parts if not any(c in part for c in "*?[")] or ["source"]
    stem = PurePath(parts[-1])
    return stem.stem if stem.suffix in (".jsonl", ".json", ".parquet") else stem.name


def source_reward(source: Source, function: str) -> str:
    """The reward that scores this source's prompts; `function` is the recipe's."""
    return source.reward or ("reasoning_gym" if source.reasoning_gym is not None else function)
