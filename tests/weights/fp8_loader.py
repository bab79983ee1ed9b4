"""What SGLang's own model makes of FP8 weights that come as messages: a program that a test starts.

    python -m tests.weights.fp8_loader MODEL FOLDER OUT.safetensors

The model is built with its FP8 parameters, as a server builds it, but for the last step, which packs them for the
kernels of GPUs and of AMX CPUs. FOLDER has two versions of the weights, `0.safetensors` and `1.safetensors`. The first
goes through the model's loader, the second to the places that were learnt meanwhile. OUT: the parameters after
each, `learnt.NAME` and `placed.NAME`, and after a plain load of all of the second, `plain.NAME`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.engine.plugin.weights_apply import Placer
from moe_asyncrl.engine.plugin.weights_learn import Learner
from moe_asyncrl.weights.message import Opened, dense_header, message_bytes, open_message, payload_view, seal
from moe_asyncrl.weights.message_part import part_view, place_parts, whole_part
from tests.weights.sglang_loaders import published

PLACE = {"epoch": 1, "version": 1, "stream": 0, "number": 0}


def message(named: dict[str, torch.Tensor]) -> Opened[torch.Tensor]:
    """One message with all of some tensors."""
    parts, nbytes = place_parts(
        whole_part(name, str(value.dtype).removeprefix("torch."), value.shape) for name, value in named.items()
    )
    header = dense_header(parts)
    buffer = torch.zeros(message_bytes(header, nbytes), dtype=torch.uint8)
    for part in parts:
        part_view(part, payload_view(buffer, header)).copy_(named[part.name])
    seal(buffer, kind="dense", header=header, **PLACE)
    return open_message(buffer, **PLACE)


def main() -> None:
    """See the module."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.plugins import load_plugins

    load_plugins()
    torch.set_default_dtype(torch.bfloat16)
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    first, second = (load_file(folder / f"{number}.safetensors") for number in (0, 1))
    fields = {"dtype": "bfloat16", "tp_size": 1}
    with torch.no_grad(), published(model, "tp", fields, 0) as (kind, config):
        quantization = Fp8Config.from_config(config.hf_config.quantization_config)
        built, other = (kind(config=config.hf_config, quant_config=quantization) for _ in range(2))
        learner = Learner(built.load_weights, lambda: dict(built.named_parameters()))
        learner.apply(0, message(first))
        learner.check_complete()
        known = learner.known()
        out = {f"learnt.{name}": p.detach().clone() for name, p in built.named_parameters()}
        placer = Placer(known, built.load_weights, dict(built.named_parameters()), sparse=False)
        placer.apply(0, message(second))
        placer.check_complete()
        out |= {f"placed.{name}": p.detach() for name, p in built.named_parameters()}
        other.load_weights(list(second.items()))
        out |= {f"plain.{name}": p.detach() for name, p in other.named_parameters()}
    print("through the loader:", *sorted(known.loader), "places:", sum(map(bool, known.places.values())))
    save_file({name: value.contiguous() for name, value in out.items()}, sys.argv[3])


if __name__ == "__main__":
    main()
