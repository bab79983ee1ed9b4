"""What a weight delta costs, in bytes and in time, beside XOR and zstd, and beside sending everything.

    python -m benchmarks.delta_codec [--quick]

bfloat16 weights, normal with a standard deviation of 0.02, of which a float32 master has taken one step of a given size
up or down in every element, as Adam's are. Two codecs, in turn, one thread:

    positions  `moe_asyncrl.weights.sparse_encode`: low bytes of positions, changes in each block, new values
    zstd       the same, and zstd (level 1) on top
    xor        XOR of the bits, zstd (level 1)

Each is decoded and applied to the old weights, and must give the new ones, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks.report import print_result
from moe_asyncrl.weights.message_part import Part, place_parts, whole_part
from moe_asyncrl.weights.sparse import bits, decode, decode_all
from moe_asyncrl.weights.sparse_encode import encode

STEPS = (1e-7, 3e-7, 1e-6, 1e-5)
CHANGES_OF_RATIOS = 3e-7
LEVEL = 1
SMALL = 4096
"""Elements of a small part."""


def positions(old: torch.Tensor, new: torch.Tensor) -> Any:
    """Ours."""
    blob = encode(old, new, max_fraction=2).blob
    assert blob is not None
    return blob


def apply_positions(old: torch.Tensor, blob: Any) -> None:
    """`old` becomes the new weights."""
    part = Part("w", "bfloat16", (len(old),), ((0, len(old), 1),), 0, len(blob))
    where, values = decode(part, blob)
    old.view(torch.int16)[where] = values


def zstd(old: torch.Tensor, new: torch.Tensor) -> Any:
    """Ours, compressed."""
    return zstandard.ZstdCompressor(LEVEL).compress(positions(old, new))


def apply_zstd(old: torch.Tensor, blob: Any) -> None:
    """`old` becomes the new weights."""
    apply_positions(old, np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint8))


def xor(old: torch.Tensor, new: torch.Tensor) -> Any:
    """The other candidate."""
    return zstandard.ZstdCompressor(LEVEL).compress((bits(old) ^ bits(new)).view(np.uint8))


def apply_xor(old: torch.Tensor, blob: Any) -> None:
    """`old` becomes the new weights."""
    before = bits(old)
    before ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), before.dtype)


CODECS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "positions": (positions, apply_positions),
    "zstd": (zstd, apply_zstd),
    "xor": (xor, apply_xor),
}


def weights(elements: int, step: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(before, after) the step."""
    g = torch.Generator().manual_seed(0)
    master = torch.randn(elements, generator=g) * 0.02
    before = master.bfloat16()
    up = torch.randint(0, 2, (elements,), generator=g, dtype=torch.int8)
    master.add_(up, alpha=2 * step).sub_(step)
    return before, master.bfloat16()


def timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """(seconds of this thread's CPU, result): on a machine that others use too, the clock on the wall says less."""
    began = time.thread_time()
    result = function(*args)
    return time.thread_time() - began, result


def compare(old: torch.Tensor, new: torch.Tensor, times: int) -> dict[str, dict[str, float]]:
    """For each codec bytes of the blob, and seconds to encode and to decode and apply; medians of runs in turn."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in CODECS}
    size = {}
    for _ in range(times):
        for name, (encoder, applier) in CODECS.items():
            encoding, blob = timed(encoder, old, new)
            copy = old.clone()
            decoding, _ = timed(applier, copy, blob)
            if not torch.equal(copy.view(torch.int16), new.view(torch.int16)):
                raise RuntimeError(f"{name} has not given back the weights")
            seconds[name].append((encoding, decoding))
            size[name] = len(blob)
    return {
        name: {
            "bytes": size[name],
            "encode_s": statistics.median(e for e, _ in runs),
            "decode_s": statistics.median(d for _, d in runs),
        }
        for name, runs in seconds.items()
    }


def small_parts(old: torch.Tensor, new: torch.Tensor) -> dict[str, float]:
    """Seconds for the same weights as parts of 4,096 elements: encoded one by one, decoded in bulk and one by one."""
    pairs = list(zip(old.split(SMALL), new.split(SMALL), strict=True))
    encoding, blobs = timed(lambda: [positions(a, b) for a, b in pairs])
    whole = [whole_part(f"w{i}", "bfloat16", (len(a),)) for i, (a, _) in enumerate(pairs)]
    parts, size = place_parts(
        Part(p.name, p.dtype, p.shape, p.ranges, 0, len(b)) for p, b in zip(whole, blobs, strict=True)
    )
    payload = np.zeros(size, np.uint8)
    for part, blob in zip(parts, blobs, strict=True):
        payload[part.offset : part.offset + len(blob)] = blob
    bulk, _ = timed(lambda: list(decode_all(parts, payload)))
    single, _ = timed(lambda: [decode(part, payload) for part in parts])
    return {"encode_s": encoding, "decode_bulk_s": bulk, "decode_single_s": single}


def speedup_of_two_threads(old: torch.Tensor, new: torch.Tensor) -> float:
    """How much faster two threads encode two halves than one encodes both."""
    halves = list(zip(old.chunk(2), new.chunk(2), strict=True))
    began = time.monotonic()
    for half in halves:
        positions(*half)
    alone = time.monotonic() - began
    with ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        list(pool.map(lambda half: positions(*half), halves))
        return alone / (time.monotonic() - began)


def main() -> None:
    """Compare the codecs at several sizes of a step."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="32 MiB, three times: under 30 s on two cores")
    args = options.parse_args()
    elements, times = (16 << 20, 3) if args.quick else (128 << 20, 7)
    torch.set_num_threads(1)
    full, gigabytes = 2 * elements, 2 * elements / 1e9
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for step in STEPS:
        old, new = weights(elements, step)
        found = compare(old, new, times)
        label = f"step_{step:.0e}".replace("e-0", "e-")
        figures[f"{label}_changed"] = encode(old, new, max_fraction=2).fraction
        for name, f in found.items():
            figures[f"{label}_{name}_bytes_of_full"] = f["bytes"] / full
            figures[f"{label}_{name}_encode_s_per_gb"] = f["encode_s"] / gigabytes
            figures[f"{label}_{name}_decode_s_per_gb"] = f["decode_s"] / gigabytes
        if step == CHANGES_OF_RATIOS:
            ours, other = found["positions"], found["xor"]
            ratios = {f"{key}_vs_xor": ours[key] / other[key] for key in ("bytes", "encode_s", "decode_s")}
            figures |= {f"small_{k}_per_gb": v / gigabytes for k, v in small_parts(old, new).items()}
            figures["two_threads_speedup"] = speedup_of_two_threads(old, new)
    settings = {"quick": args.quick, "elements": elements, "times": times, "ratios_at_step": CHANGES_OF_RATIOS}
    print_result("delta_codec", ratios=ratios, figures=figures, settings=settings)


if __name__ == "__main__":
    main()
