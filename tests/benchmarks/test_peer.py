"""The peer: answers as long as planned, one clear line when something is missing, and no process left."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.peer_trl.environment import ensure_environment, fingerprint, torch_pin
from benchmarks.peer_trl.process import Peer
from benchmarks.peer_trl.train import Slices, exactly
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.tiny import make_tiny_model

LENGTHS = {"02+03=": 3, "12+13=": 9, "20+30=": 1}


def test_every_answer_has_its_length_and_ends_with_the_end_token(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    make_tiny_model(tmp_path / "model", "qwen3_moe", 0, alphabet="ascii", init_std=0.5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    limit: dict[str, Any] = {}
    exactly(model, tokenizer, LENGTHS, limit)
    prompts = [*LENGTHS, *LENGTHS]
    ids = torch.tensor([tokenizer(p)["input_ids"] for p in prompts])
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = GenerationConfig(max_new_tokens=12, do_sample=True, pad_token_id=pad, eos_token_id=eos)

    def sampled() -> list[int]:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[:, ids.shape[1] :]
        ends = [row.index(eos) for row in out.tolist()]
        assert all(set(row[end + 1 :]) <= {pad} for row, end in zip(out.tolist(), ends, strict=True))
        return [end + 1 for end in ends]

    assert sampled() == [LENGTHS[p] for p in prompts]
    limit["cap"] = 4
    assert sampled() == [min(4, LENGTHS[p]) for p in prompts]


def test_trained_tokens_are_those_of_the_mask_and_padding_is_told_apart() -> None:
    trainer = SimpleNamespace(
        _generate_single_turn=lambda: None,
        _generate_and_score_completions=lambda: None,
        _compute_loss=lambda model, inputs: "loss",
    )
    slices = Slices(trainer, None, {})
    inputs = {
        "prompt_ids": torch.zeros(2, 3, dtype=torch.long),
        "prompt_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "completion_ids": torch.zeros(2, 5, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
    }
    assert trainer._compute_loss(None, inputs) == "loss"
    assert trainer._compute_loss(None, inputs) == "loss"
    assert (slices.tokens, slices.real, slices.positions) == (14, 24, 32)


def test_a_peer_that_cannot_load_says_why_in_one_line(tmp_path: Path) -> None:
    """Our own environment has no TRL."""
    import sys

    peer = Peer(Path(sys.executable), {"threads": 1}, tmp_path)
    with pytest.raises(UserError, match=r"No module named 'trl'.*remove \.venv-trl") as caught, peer:
        pass
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"cannot be started.*make setup-trl"), Peer(tmp_path / "none", {}, tmp_path):
        pass


def test_an_interrupt_leaves_no_peer(tmp_path: Path) -> None:
    """A stand-in that never reads: the real one is as deaf for the length of a step."""
    deaf = tmp_path / "deaf"
    deaf.write_text('#!/bin/sh\necho \'{"torch": "1", "transformers": "2", "trl": "3"}\'\nexec sleep 600\n')
    deaf.chmod(0o755)
    pid = 0
    with pytest.raises(KeyboardInterrupt), Peer(deaf, {}, tmp_path) as peer:
        assert peer.versions == {"torch": "1", "transformers": "2", "trl": "3"}
        assert peer._process is not None
        pid = peer._process.pid
        assert psutil.pid_exists(pid)
        raise KeyboardInterrupt
    assert not psutil.pid_exists(pid)


def test_an_environment_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    lock = tmp_path / "trl.txt"
    with pytest.raises(UserError, match=r"trl.txt: No such file.*make lock"):
        ensure_environment(folder=tmp_path / "env", lock=lock)
    lock.write_text("./no-such-package\n")
    with pytest.raises(UserError, match=r"environment env: installing trl\.txt failed: ERROR") as caught:
        ensure_environment(folder=tmp_path / "env", lock=lock)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "env" / ".stamp").exists(), "what is half made would be taken for whole"
    (tmp_path / "env" / ".stamp").write_text(fingerprint(lock.read_text()))
    assert ensure_environment(folder=tmp_path / "env", lock=lock) == tmp_path / "env" / "bin" / "python"


def test_the_lock_has_the_torch_that_ours_uses() -> None:
    root = Path(__file__).resolve().parents[2] / "requirements"
    assert torch_pin((root / "trl.txt").read_text()) in (root / "cpu.txt").read_text().splitlines()
    assert "trl==1.16.0" in (root / "trl.txt").read_text().splitlines()
    with pytest.raises(UserError, match="does not name torch"):
        torch_pin("trl==1.16.0\n")
