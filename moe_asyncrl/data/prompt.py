"""One prompt, and how it is read from a record: the fields of a JSON line, or a row of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from moe_asyncrl.data.errors import UserError

Message = dict[str, Any]
"""One chat message: at least `role` and `content`, both text; what else it has goes to the chat template."""

SOURCE_NAME = "source_name"
"""Key under which a trajectory's metadata has the name of its prompt's source."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    source: str
    """`FILE:LINE`, `FILE[ROW]` or `TASK[INDEX]`, for messages and for `Identity.prompt`."""
    prompt: str | None
    """Plain text; None where `messages` is given."""
    messages: tuple[Message, ...] | None
    answer: str | None
    """The reference; a JSON number is kept as its text."""
    metadata: dict[str, Any]
    """Every other field of the record, as JSON values."""
    name: str = ""
    """Name of the source of a mixture; empty where the recipe names one path."""
    reward: str | None = None
    """Reward of the source, instead of the recipe's."""
    entry: str | None = None
    """What a task's own scorer reads beside the answer; it does not travel with trajectories."""

    @property
    def text(self) -> str:
        """What the reward function sees as the prompt: the text, or the messages' contents joined by newlines."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(m["content"] for m in self.messages or ())

    def metadata_text(self) -> dict[str, str]:
        """The metadata with every value as text (JSON, unless it is text already): what a trajectory carries."""
        text = {k: v if isinstance(v, str) else msgspec.json.encode(v).decode() for k, v in self.metadata.items()}
        return {**text, SOURCE_NAME: self.name} if self.name else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """Where prompt and answer stand in a record, and what is put around the prompt.

    A name may lead into a record inside the record: `reward_model.ground_truth`. Without names the fields are `prompt`
    or `messages`, and `answer` where there is one; a field that is named must be there.
    """

    prompt: str | None = None
    messages: str | None = None
    answer: str | None = None
    chat: bool = False
    """Make the text one message of a user."""
    system: str | None = None
    """A system message before it; makes it a chat."""
    instruction: str | None = None
    """Text put behind it."""

    @property
    def places(self) -> tuple[str | None, str | None, str]:
        """Names of prompt, messages and answer; None for what is not looked for."""
        prompt = self.prompt or (None if self.messages else "prompt")
        messages = self.messages or (None if self.prompt else "messages")
        return prompt, messages, self.answer or "answer"

    @property
    def required(self) -> dict[str, str]:
        """Setting -> the field that it names."""
        named = {"prompt_field": self.prompt, "messages_field": self.messages, "answer_field": self.answer}
        return {setting: name for setting, name in named.items() if name is not None}


def prompt_from(record: Mapping[str, Any], source: str, fields: Fields) -> Prompt:
    """The prompt in a record of JSON values. Raises UserError that starts with `source`."""
    for setting, name in fields.required.items():
        if not _has(record, name):
            raise UserError(f"{source}: no field {name!r} ({setting}); it has: {', '.join(record) or 'none'}")
    places = fields.places
    prompt, messages, answer = (None if name is None else _look_up(record, name) for name in places)
    if (prompt is None) == (messages is None):
        names = " or ".join(f"`{name}`" for name in places[:2] if name)
        found = "neither" if prompt is None else "both"
        raise UserError(
            f"{source}: give either {names}; {found} found" if " or " in names else f"{source}: {names} is empty"
        )
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        hint = f"; it is a list: name it as messages_field {places[0]!r}" if isinstance(prompt, list) else ""
        raise UserError(f"{source}: `{places[0]}` must be text that is not empty{hint}")
    text, chat = _around(prompt, messages, source, fields, str(places[1]))
    return Prompt(
        source=source,
        prompt=text,
        messages=None if chat is None else _checked_messages(chat, source, str(places[1])),
        answer=_checked_answer(answer, source, places[2]),
        metadata={k: v for k, v in record.items() if k not in places},
    )


def _around(
    prompt: str | None, messages: Any, source: str, fields: Fields, messages_name: str
) -> tuple[str | None, Any]:
    """(text, messages) with what the source puts around them; one of the two is None."""
    if not (fields.chat or fields.system is not None or fields.instruction is not None):
        return prompt, messages
    if prompt is None:
        raise UserError(f"{source}: `chat`, `system` and `instruction` go around a text; `{messages_name}` is a chat")
    text = prompt if fields.instruction is None else f"{prompt}\n{fields.instruction}"
    if not fields.chat and fields.system is None:
        return text, None
    before = [] if fields.system is None else [{"role": "system", "content": fields.system}]
    return None, [*before, {"role": "user", "content": text}]


def _has(record: Mapping[str, Any], name: str) -> bool:
    return name in record or ("." in name and _look_up(record, name) is not None)


def _look_up(record: Mapping[str, Any], name: str) -> Any:
    if name in record or "." not in name:
        return record.get(name)
    at: Any = record
    for part in name.split("."):
        at = at.get(part) if isinstance(at, Mapping) else None
    return at


def _checked_messages(messages: object, source: str, name: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{source}: `{name}` must be a list of at least one message")
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
            raise UserError(f"{source}: {name}[{i}] needs `role` and `content`, both text")
    return tuple(messages)


def _checked_answer(answer: object, source: str, name: str) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        raise UserError(f"{source}: `{name}` must be text or a number, found {type(answer).__name__}")
    return str(answer)
