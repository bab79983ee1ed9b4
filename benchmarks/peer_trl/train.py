"""TRL's `GRPOTrainer` under the benchmark's hand. Runs in the peer's own environment and imports nothing of ours.

    .venv-trl/bin/python benchmarks/peer_trl/train.py SETTINGS.json

Reads one line from stdin for each slice ({"steps": n, "cap": longest answer or null}), trains so many optimizer steps,
and answers with one line on stdout ({"seconds", "tokens", "steps", ...}). Before the first slice it says
{"ready": ...}. Ends when stdin does.

A slice lasts from the beginning of its first step to the end of its last one: generation, rewards, advantages, all
micro-batches, optimizer. Imports, loading, and TRL's own set-up lie before it.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Build the trainer, then train slice by slice until stdin ends."""
    end_with_parent()
    # What the libraries print goes to the log; stdout speaks to the benchmark only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    import torch

    torch.set_num_threads(settings["threads"])
    import transformers
    import trl

    trainer = build(settings)
    slices = Slices(trainer, answer, settings)
    trainer.add_callback(slices.callback())
    answer(ready=True, torch=torch.__version__, transformers=transformers.__version__, trl=trl.__version__)
    with contextlib.suppress(EndOfSlices):
        trainer.train()


def end_with_parent() -> None:
    """Have the kernel kill this process when the benchmark is gone, however it went."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit("the benchmark is gone")


def build(settings: dict[str, Any]) -> Any:
    """The trainer: the same model, prompts, batch, loss and optimizer as on our side."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    lines = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    lengths = {line["prompt"]: int(line.get("length", settings["max_new_tokens"])) for line in lines}
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32, experts_implementation=settings["experts"]
    )
    batch = settings["groups"] * settings["group_size"]
    config = GRPOConfig(
        output_dir=settings["output"],
        use_cpu=True,
        bf16=False,
        max_steps=10**6,
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=batch // settings["micro_batch"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        scale_rewards="none",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        router_aux_loss_coef=0.0,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        seed=settings["seed"],
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=exact,
        train_dataset=Dataset.from_list([{"prompt": line["prompt"], "answer": line["answer"]} for line in lines]),
    )
    exactly(trainer.model, tokenizer, lengths, settings)
    return trainer


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right answer."""
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]


def exactly(model: Any, tokenizer: Any, lengths: dict[str, int], limit: dict[str, Any]) -> None:
    """Let `model.generate` sample exactly as many tokens as each prompt's answer is to have.

    The end token is forbidden before the last token and certain there. It counts as a trained token with TRL, as the
    last sampled token does with us. `limit["cap"]`, if there is one, is the longest answer for now (warm-up).
    """
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    wanted = {tuple(tokenizer(text)["input_ids"]): n for text, n in lengths.items()}
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    original = model.generate

    class Exactly(LogitsProcessor):
        def __init__(self, inputs: Any) -> None:
            rows = [tuple(i for i in row if i != pad) for row in inputs.tolist()]
            self.prompt = inputs.shape[1]
            cap = limit.get("cap") or max(lengths.values())
            self.last = torch.tensor([min(wanted[row], cap) for row in rows]) - 1

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            done = input_ids.shape[1] - self.prompt
            here = self.last == done
            scores = scores.clone()
            scores[:, eos] = float("-inf")
            if bool(here.any()):
                scores[here] = float("-inf")
                scores[here, eos] = 0.0
            return scores

    def generate(input_ids: Any, **arguments: Any) -> Any:
        return original(input_ids, logits_processor=LogitsProcessorList([Exactly(input_ids)]), **arguments)

    model.generate = generate


class EndOfSlices(Exception):
    """The benchmark wants no more."""


class Slices:
    """Waits for the benchmark before a slice, and tells what the slice came to after it."""

    def __init__(self, trainer: Any, answer: Any, limit: dict[str, Any]) -> None:
        """`limit["cap"]` is set for each slice to the one that it was asked with."""
        self.trainer, self.answer, self.limit = trainer, answer, limit
        self.left = self.steps = 0
        self.began = self.cpu = 0.0
        self.seconds: dict[str, float] = {}
        self.tokens = self.positions = self.real = 0
        self.watch("_generate_single_turn", "generate")
        self.watch("_generate_and_score_completions", "prepare")
        self.count()

    def watch(self, method: str, name: str) -> None:
        """Add up the seconds spent in a method of the trainer."""
        original = getattr(self.trainer, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        setattr(self.trainer, method, timed)

    def count(self) -> None:
        """Count the completion tokens that the loss is taken over, and the positions that are computed for them."""
        original = self.trainer._compute_loss

        def counted(model: Any, inputs: Any) -> Any:
            self.tokens += int(inputs["completion_mask"].sum())
            self.positions += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
            self.real += int(inputs["prompt_mask"].sum()) + int(inputs["completion_mask"].sum())
            return original(model, inputs)

        self.trainer._compute_loss = counted

    def callback(self) -> Any:
        """The trainer's callback."""
        from transformers import TrainerCallback

        slices = self

        class Gate(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                if slices.left == 0:
                    slices.wait()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                slices.left -= 1
                if slices.left == 0:
                    slices.tell()

        return Gate()

    def wait(self) -> None:
        """Until the benchmark asks for a slice."""
        line = sys.stdin.readline()
        if not line:
            raise EndOfSlices
        asked = json.loads(line)
        self.left = self.steps = int(asked["steps"])
        self.limit["cap"] = asked.get("cap")
        self.seconds, self.tokens, self.positions, self.real = {}, 0, 0, 0
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def tell(self) -> None:
        """What the slice came to."""
        seconds = time.perf_counter() - self.began
        self.answer(
            seconds=seconds,
            cpu_seconds=time.process_time() - self.cpu,
            steps=self.steps,
            tokens=self.tokens,
            positions=self.positions,
            real=self.real,
            generate_seconds=self.seconds.get("generate", 0.0),
            prepare_seconds=self.seconds.get("prepare", 0.0),
        )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
