"""The JSONL prompt source: what it accepts, what it refuses and with which words, and its order."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompts import PromptFile, PromptOrder, parse_line, permutation


def write(folder: pathlib.Path, content: bytes | str) -> pathlib.Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_fields_of_a_line(tmp_path: pathlib.Path) -> None:
    path = write(
        tmp_path,
        '\ufeff{"prompt": "1+1=", "answer": 2, "level": 3, "tags": ["a"], "task": "sum"}\n\n'
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é?"}], "answer": "ja"}',
    )
    prompts = PromptFile.open(path)
    assert len(prompts) == 2
    first, second = prompts
    assert (first.prompt, first.answer, first.messages) == ("1+1=", "2", None)
    assert first.metadata == {"level": 3, "tags": ["a"], "task": "sum"}
    assert first.metadata_text() == {"level": "3", "tags": '["a"]', "task": "sum"}
    assert first.source == f"{path}:1" and second.source == f"{path}:3"  # the blank line counts
    assert second.text == "Be brief.\né?" and second.prompt is None
    assert prompts[1] == second and prompts[0] == first  # by offset, in any order


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "a", ', "not valid JSON"),
        (b'["a"]', "expected a JSON object, found list"),
        (b'{"answer": "1"}', "neither found"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "both found"),
        (b'{"prompt": ""}', "must be text that is not empty"),
        (b'{"prompt": 3}', "must be text that is not empty"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": [{"role": "user"}]}', "messages[0] needs `role` and `content`"),
        (b'{"prompt": "a", "answer": [1]}', "`answer` must be text or a number, found list"),
        (b'{"prompt": "a", "answer": true}', "`answer` must be text or a number, found bool"),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8 (byte 13 of the line is 0xff)"),
    ],
)
def test_a_bad_line_is_named(tmp_path: pathlib.Path, line: bytes, says: str) -> None:
    path = write(tmp_path, b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(UserError) as e:
        PromptFile.open(path)
    assert str(e.value).startswith(f"{path}:2: ") and says in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("content", [b"", b"\n \n\n"])
def test_a_file_without_prompts(tmp_path: pathlib.Path, content: bytes) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UserError, match="holds no prompt"):
        PromptFile.open(path)


def test_a_missing_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        PromptFile.open(tmp_path / "none.jsonl")


def test_a_limit_leaves_the_rest_unread(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\nbroken\n')
    assert [p.prompt for p in PromptFile.open(path, limit=2)] == ["a", "b"]


def test_a_file_that_changes_is_noticed(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n')
    prompts = PromptFile.open(path)
    write(tmp_path, '{"prompt": "longer than it was"}\n')
    with pytest.raises(UserError, match=r"prompts\.jsonl:2: not valid JSON"):
        prompts[1]


@given(
    st.text(min_size=1),
    st.dictionaries(st.text().filter(lambda k: k not in ("prompt", "messages", "answer")), st.text()),
)
def test_any_text_survives(text: str, metadata: dict[str, str]) -> None:
    import msgspec

    line = msgspec.json.encode({"prompt": text, "answer": text, **metadata})
    prompt = parse_line(line, "x:1")
    assert prompt.prompt == text and prompt.answer == text and prompt.metadata == metadata


@given(st.integers(1, 200), st.integers(0, 2**31 - 1), st.integers(0, 5))
def test_each_epoch_has_each_prompt_once(n: int, seed: int, epoch: int) -> None:
    order = PromptOrder(n, seed=seed, shuffle=True)
    got = [order.at(epoch * n + i) for i in range(n)]
    assert [e for e, _ in got] == [epoch] * n
    assert sorted(p for _, p in got) == list(range(n))


def test_epochs_and_seeds_differ_and_no_shuffle_keeps_the_order() -> None:
    orders = {tuple(permutation(50, seed=s, epoch=e)) for s in (0, 1) for e in (0, 1)}
    assert len(orders) == 4
    plain = PromptOrder(3, seed=0, shuffle=False)
    assert [plain.at(i) for i in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    with pytest.raises(IndexError):
        plain.at(-1)


def test_the_order_does_not_depend_on_what_was_asked_before() -> None:
    order = PromptOrder(7, seed=5, shuffle=True)
    asked = np.random.default_rng(0).integers(0, 70, 200)
    assert [order.at(int(i)) for i in asked] == [PromptOrder(7, seed=5, shuffle=True).at(int(i)) for i in asked]


def test_the_order_is_the_same_in_another_process() -> None:
    """A fresh process, because what is proved is that nothing of this one (hash seed, state) is in the order."""
    code = "from moe_asyncrl.data.prompts import permutation; print(permutation(9, seed=3, epoch=2).tolist())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == str(permutation(9, seed=3, epoch=2).tolist())
    assert permutation(9, seed=3, epoch=2).tolist() == [
        8,
        2,
        4,
        1,
        3,
        6,
        5,
        0,
        7,
    ]  # and in every build: checkpoints count on it
