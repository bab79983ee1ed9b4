"""Converting a checkpoint of 128 experts in many files, both ways, beside `cp` of the same files.

    python -m benchmarks.convert --quick

The checkpoint is made here: Qwen3-MoE in bfloat16 with random bits as weights, 12 GB, with `--quick` 1 GB. Measured in
turn: cp, ours, cp, ours, …, each from the start of its process to the end of the `sync` behind it, each into a new
place; all but the last of ours are removed. Where this process may, the page cache is dropped before each one (`cold`
in the settings). A ratio is our rate over cp's in one pair; the median over the pairs is reported. Afterwards the
weights that went both ways are compared with the original, bit by bit.

Memory is anonymous memory (RssAnon of /proc/PID/status: no pages of files), summed over the command and its workers at
one moment, the largest of all moments; looked at every 20 ms, by a thread of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import print_result
from moe_asyncrl.checkpoint.convert.hf_files import index_text, plan_files
from moe_asyncrl.checkpoint.safetensors_header import INDEX
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec

LIMIT_S = 1200
LOOK_S = 0.02
BLOCK = 64 << 20
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
FULL = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 10}
"""The widths of Qwen3-30B-A3B."""
QUICK = {"hidden_size": 1024, "moe_intermediate_size": 384, "num_hidden_layers": 3}


@dataclass
class Memory:
    """Largest anonymous memory of a process and its descendants, in bytes."""

    peak: int = 0
    _end: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self, pid: int) -> Iterator[None]:
        """Look on until the body ends."""
        thread = threading.Thread(target=self._look, args=(psutil.Process(pid),))
        self._end.clear()
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _look(self, process: psutil.Process) -> None:
        while not self._end.wait(LOOK_S):
            try:
                family = [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.peak = max(self.peak, sum(anonymous(p.pid) for p in family))


def anonymous(pid: int) -> int:
    """Anonymous memory of a process in bytes; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def make_checkpoint(out: Path, sizes: dict[str, int], shard_bytes: int) -> int:
    """Write a checkpoint of random bits; its bytes."""
    config = CONFIG | sizes
    spec = ModelSpec.from_hf_config(config)
    tensors = [(t.name, t.shape, "bfloat16") for t in parameter_map(spec).hf_tensors()]
    files = plan_files(out, tensors, shard_bytes, None)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / INDEX).write_text(index_text(files))
    block = random.Random(0).randbytes(BLOCK)
    for number, file in enumerate(files):
        with (out / file.name).open("wb") as target:
            target.write(file.header)
            left, begin = file.size - len(file.header), number * 4097 % BLOCK
            while left:
                target.write(part := block[begin : begin + left])
                left, begin = left - len(part), 0
    return sum(file.size for file in files)


def drop_caches() -> bool:
    """Write back and forget what is cached of files. False if this process may not."""
    subprocess.run(["sync"], check=True, timeout=LIMIT_S)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def timed(command: list[str], memory: Memory | None = None) -> float:
    """Seconds of a command and the `sync` behind it. Raises RuntimeError if it fails."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if memory is None:
        _, said = process.communicate(timeout=LIMIT_S)
    else:
        with memory.watching(process.pid):
            _, said = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}: {said.strip()}")
    subprocess.run(["sync"], check=True, timeout=LIMIT_S)
    return time.monotonic() - began


def convert(*arguments: str) -> list[str]:
    """The command line of a conversion."""
    return [sys.executable, "-m", "moe_asyncrl.cli", "convert", *arguments]


def measure(source: Path, out: Path, what: str, pairs: int, memory: Memory) -> tuple[list[float], list[float]]:
    """Seconds of cp and of ours, pair by pair. The last of ours stays."""
    theirs, ours = [], []
    for pair in range(pairs):
        for mine in (False, True):
            drop_caches()
            if mine:
                ours.append(timed(convert(what, str(source), str(out)), memory))
            else:
                theirs.append(timed(["cp", "-r", str(source), str(out)]))
            if not mine or pair < pairs - 1:
                shutil.rmtree(out)
    return theirs, ours


def main() -> None:
    """Make a checkpoint, convert it both ways, print the result."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="1 GB: under 60 s on two cores")
    options.add_argument("--pairs", type=int, help="pairs in each direction (default: 2, with --quick 3)")
    options.add_argument("--folder", type=Path, help="where to make it (default: a temporary folder)")
    args = options.parse_args()
    pairs = args.pairs or (3 if args.quick else 2)
    sizes = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory(prefix="convert-", dir=args.folder) as place:
        scratch = Path(place)
        hf, megatron, back = scratch / "hf", scratch / "megatron", scratch / "back"
        size = make_checkpoint(hf, sizes, (50 if args.quick else 500) * 1000**2)
        cold = drop_caches()
        memory = Memory()
        cp_hf, to_megatron = measure(hf, megatron, "hf-to-megatron", pairs, memory)
        files = len(list(hf.glob("*.safetensors")))
        cp_megatron, to_hf = measure(megatron, back, "megatron-to-hf", pairs, memory)
        shutil.rmtree(megatron)
        timed(convert("diff", str(hf), str(back)))  # exit code 1 if a bit differs
    print_result(
        "convert",
        ratios={
            "hf_to_megatron_vs_cp": _median_ratio(cp_hf, to_megatron),
            "megatron_to_hf_vs_cp": _median_ratio(cp_megatron, to_hf),
        },
        figures={
            "peak_memory_gib": memory.peak / 2**30,
            "hf_to_megatron_gb_per_s": size / 1e9 / statistics.median(to_megatron),
            "megatron_to_hf_gb_per_s": size / 1e9 / statistics.median(to_hf),
            "cp_hf_gb_per_s": size / 1e9 / statistics.median(cp_hf),
            "cp_megatron_gb_per_s": size / 1e9 / statistics.median(cp_megatron),
            "hf_to_megatron_pairs": [round(a / b, 3) for a, b in zip(cp_hf, to_megatron, strict=True)],
            "megatron_to_hf_pairs": [round(a / b, 3) for a, b in zip(cp_megatron, to_hf, strict=True)],
        },
        settings={
            "quick": args.quick,
            "pairs": pairs,
            "cold": cold,
            "gb": round(size / 1e9, 2),
            "files": files,
            "workers": len(os.sched_getaffinity(0)),
            **sizes,
        },
    )


def _median_ratio(theirs: list[float], ours: list[float]) -> float:
    """Our rate over theirs."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


if __name__ == "__main__":
    main()
