"""Sources beyond one JSONL file: the same prompts from each kind, and one clear line for what cannot be read."""

from __future__ import annotations

import datetime
import decimal
import json
import pathlib
import subprocess
import sys
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from moe_asyncrl.config.recipe import Source
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Prompt
from moe_asyncrl.data.sources.opening import Prompts, add_to_digest, open_prompts

ROWS = [{"question": f"{i} + 1 = ?", "gold": {"value": str(i + 1)}, "level": i % 3} for i in range(50)]


def open_one(**fields: Any) -> Prompts:
    return open_prompts((Source(**fields),), use="train", seed=0)


def opened(folder: pathlib.Path, kind: str, rows: list[dict[str, Any]] = ROWS) -> dict[str, Any]:
    """The rows written as `kind`; the fields of a source that reads them."""
    table = pa.Table.from_pylist(rows)
    if kind == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return {"path": str(folder / "rows.jsonl")}
    if kind == "parquet":
        pq.write_table(table, folder / "rows.parquet", row_group_size=7)
        return {"path": str(folder / "rows.parquet")}
    if kind == "dataset":
        datasets.Dataset(table).save_to_disk(str(folder / "saved"))
        return {"path": str(folder / "saved")}
    if kind == "splits":
        both = {"train": datasets.Dataset(table), "test": datasets.Dataset(table.slice(0, 3))}
        datasets.DatasetDict(both).save_to_disk(str(folder / "splits"))
        return {"path": str(folder / "splits"), "split": "train"}
    (folder / "data").mkdir()
    for i in range(5):
        pq.write_table(table.slice(i * 10, 10), folder / "data" / f"train-{i:05}-of-00005.parquet")
    pq.write_table(table.slice(0, 3), folder / "data" / "test-00000-of-00001.parquet")
    return {"path": str(folder), "split": "train"} if kind == "folder" else {"path": str(folder / "*" / "train-*")}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset", "splits", "folder", "glob"])
def test_the_same_prompts_from_every_kind(tmp_path: pathlib.Path, kind: str) -> None:
    seen: list[str] = []
    source = Source(**opened(tmp_path, kind), prompt_field="question", answer_field="gold.value", name="sums")
    prompts = open_prompts((source,), use="train", seed=0, check=lambda p: seen.append(p.text))
    assert seen == [r["question"] for r in ROWS]  # every row was looked at, once
    assert len(prompts) == 50
    for i in (49, 0, 13, 7, 6):  # in any order
        p = prompts[i]
        assert (p.prompt, p.answer, p.name) == (ROWS[i]["question"], str(i + 1), "sums")
        assert p.metadata == {"gold": {"value": str(i + 1)}, "level": i % 3}
    assert p.metadata_text()["source_name"] == "sums"
    prompts.close()


def test_messages_and_kinds_of_values(tmp_path: pathlib.Path) -> None:
    chat = [{"role": "user", "content": "hi", "name": None}]
    row = {
        "prompt": chat,
        "answer": 3,
        "at": datetime.datetime(2024, 1, 2, 3),
        "price": decimal.Decimal("1.50"),
        "picture": {"bytes": b"\x00", "path": "x.png"},
        "tags": ["a", "b"],
    }
    table = pa.Table.from_pylist([row])
    table = table.append_column("kind", pa.array(["sum"]).dictionary_encode())
    pq.write_table(table, tmp_path / "t.parquet")
    (p,) = open_one(path=str(tmp_path / "t.parquet"), messages_field="prompt")
    assert p.messages == ({"role": "user", "content": "hi"},) and p.answer == "3"
    assert p.metadata == {"at": "2024-01-02T03:00:00", "price": "1.50", "tags": ["a", "b"], "kind": "sum"}


def test_text_around_a_prompt(tmp_path: pathlib.Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1?"}\n')
    path = str(tmp_path / "t.jsonl")
    assert [p.prompt for p in open_one(path=path, instruction="Be brief.")] == ["1+1?\nBe brief."]
    (p,) = open_one(path=path, instruction="Be brief.", system="You add.")
    assert p.prompt is None and p.messages == (
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "1+1?\nBe brief."},
    )
    (tmp_path / "m.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (p,) = open_one(path=str(tmp_path / "m.jsonl"))
    assert p.messages is not None
    with pytest.raises(UserError, match=r"m\.jsonl:1: `chat`, `system` and `instruction` go around a text"):
        _check(path=str(tmp_path / "m.jsonl"), chat=True)


def _check(**fields: Any) -> None:
    open_prompts((Source(**fields),), use="train", seed=0, check=lambda p: None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "rows.parquet: no column `prompt` or `messages`; name one with prompt_field or messages_field; it has: "),
        ({"prompt_field": "text"}, "no column 'text' (prompt_field); it has: question, gold, level"),
        ({"prompt_field": "question", "answer_field": "gold.text"}, "no column 'gold.text' (answer_field)"),
        ({"prompt_field": "level"}, "rows.parquet[0]: `level` must be text that is not empty"),
        ({"messages_field": "question"}, "rows.parquet[0]: `question` must be a list of at least one message"),
        ({"prompt_field": "question", "split": "train"}, "a split is one of a folder"),
    ],
)
def test_wrong_fields_of_a_table(tmp_path: pathlib.Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as e:
        _check(**opened(tmp_path, "parquet"), **fields)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_a_field_that_a_line_lacks_is_named_with_those_it_has(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:1: no field 'text' \(prompt_field\); it has: question, gold"):
        _check(**opened(tmp_path, "jsonl"), prompt_field="text")
    rows = [{"prompt": [{"role": "user", "content": "a"}]}]
    with pytest.raises(UserError, match=r"`prompt` must be text that is not empty; it is a list: name it as messages_"):
        _check(**opened(tmp_path, "jsonl", rows))


def test_files_that_are_none(tmp_path: pathlib.Path) -> None:
    good = pathlib.Path(opened(tmp_path, "parquet")["path"]).read_bytes()
    cases = {
        "text.parquet": (b'{"prompt": "a"}\n', "cannot be read as Parquet"),
        "empty.parquet": (b"", "cannot be read as Parquet"),
        "cut.parquet": (good[: len(good) // 2], "cannot be read as Parquet"),
        "empty.jsonl": (b"", "holds no prompt"),
    }
    for name, (content, says) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as e:
            _check(path=str(tmp_path / name), **({"prompt_field": "question"} if name == "cut.parquet" else {}))
        assert name in str(e.value) and says in str(e.value) and "\n" not in str(e.value)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r"none\.parquet: holds no row"):
        _check(path=str(tmp_path / "none.parquet"))


def test_a_damaged_page_is_found_before_the_run(tmp_path: pathlib.Path) -> None:
    path = pathlib.Path(opened(tmp_path, "parquet")["path"])
    data = bytearray(path.read_bytes())
    data[20:400] = b"\xff" * 380
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"rows\.parquet: cannot be read as Parquet"):
        _check(path=str(path), prompt_field="question")


def test_a_file_without_its_suffix_is_known_by_its_first_bytes(tmp_path: pathlib.Path) -> None:
    path = pathlib.Path(opened(tmp_path, "parquet")["path"])
    path.rename(tmp_path / "rows")
    assert len(open_one(path=str(tmp_path / "rows"), prompt_field="question")) == 50


def test_folders_that_are_none(tmp_path: pathlib.Path) -> None:
    saved = opened(tmp_path, "splits")["path"]
    with pytest.raises(UserError, match="name a split; it has: train, test"):
        _check(path=saved)
    with pytest.raises(UserError, match="no split 'dev'; it has: train, test"):
        _check(path=saved, split="dev")
    arrow = next((pathlib.Path(saved) / "train").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:200])
    with pytest.raises(UserError, match="train: cannot be read as a data set"):
        _check(path=saved, split="train", prompt_field="question")
    (tmp_path / "void").mkdir()
    with pytest.raises(UserError, match=r"no \.jsonl or \.parquet file in this folder"):
        _check(path=str(tmp_path / "void"))
    with pytest.raises(UserError, match="no file fits this pattern"):
        _check(path=str(tmp_path / "*.nothing"))
    (tmp_path / "two").mkdir()
    for name in ("a.jsonl", "b.parquet"):
        (tmp_path / "two" / name).touch()
    with pytest.raises(UserError, match="Parquet and other files side by side"):
        _check(path=str(tmp_path / "two"))
    (tmp_path / "two" / "b.parquet").unlink()
    with pytest.raises(UserError, match=r"no file begins with split 'train'; there are: a\.jsonl"):
        _check(path=str(tmp_path / "two"), split="train")


def test_a_limit_takes_from_each_source_by_weight(tmp_path: pathlib.Path) -> None:
    entry = (
        Source(**opened(tmp_path, "jsonl"), prompt_field="question", name="a", weight=3),
        Source(**opened(tmp_path, "parquet"), prompt_field="question", name="b"),
    )
    prompts = open_prompts(entry, use="eval", seed=0, limit=8)
    assert [p.name for p in prompts] == ["a"] * 6 + ["b"] * 2
    assert [p.text for p in prompts] == [r["question"] for r in (*ROWS[:6], *ROWS[:2])]


def digest(entry: str | tuple[Source, ...]) -> str:
    h = xxhash.xxh3_128()
    add_to_digest(h, entry, use="train", seed=0)
    return h.hexdigest()


def test_the_digest_of_a_resume_sees_what_changes_the_order(tmp_path: pathlib.Path) -> None:
    fields = opened(tmp_path, "jsonl")
    path = fields["path"]
    assert digest(path) == xxhash.xxh3_128(pathlib.Path(path).read_bytes()).hexdigest()  # as before there were sources
    one = digest((Source(**fields),))
    others = [
        digest((Source(**fields, weight=2),)),
        digest((Source(**fields, prompt_field="question"),)),
        digest((Source(reasoning_gym="chain_sum"),)),
        digest((Source(reasoning_gym="chain_sum", seed=1),)),
        digest((Source(reasoning_gym="chain_sum", config={"min_terms": 3}),)),
    ]
    assert len({one, *others}) == 6
    assert one == digest((Source(**fields, reward="math", name="x"),))  # these change no prompt
    with open(path, "a") as f:
        f.write("\n")
    assert digest((Source(**fields),)) != one


MEMORY = """
import sys
import pyarrow, pyarrow.parquet
if sys.argv[2] == "dataset":
    import datasets
from moe_asyncrl.config.recipe import Source
from moe_asyncrl.data.sources.opening import open_prompts

def anonymous():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) // 1024

before = anonymous()
prompts = open_prompts((Source(path=sys.argv[1]),), use="train", seed=0)
order = prompts.order(seed=0, shuffle=True)
total = sum(len(prompts[order.at(i)[1]].text) for i in range(500))
print(len(prompts), total, anonymous() - before)
"""


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_a_big_table_is_not_held_in_memory(tmp_path: pathlib.Path, kind: str) -> None:
    """A fresh process, as the memory of this one is full of other tests. 200 MB of text in one row group."""
    rows = 100_000
    table = pa.table({"prompt": pa.array([f"{i:08}" + chr(97 + i % 26) * 2000 for i in range(rows)])})
    if kind == "parquet":
        path = tmp_path / "big.parquet"
        pq.write_table(table, path, row_group_size=rows, use_dictionary=False, compression="snappy")
    else:
        path = tmp_path / "big"
        datasets.Dataset(table).save_to_disk(str(path))
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path), kind], capture_output=True, text=True, check=True, timeout=120
    )
    count, total, grown_mb = map(int, out.stdout.split())
    assert (count, total) == (rows, 500 * 2008)
    assert grown_mb < 80, f"{grown_mb} MB for a table of 200 MB"


def test_nothing_is_left_in_the_temporary_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    prompts = open_one(**opened(tmp_path, "parquet"), prompt_field="question")
    first: Prompt = prompts[0]
    assert first.text == "0 + 1 = ?" and list((tmp_path / "t").iterdir()) == []
