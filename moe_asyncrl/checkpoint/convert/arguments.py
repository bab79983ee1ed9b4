"""The command line of `moe-asyncrl convert`. Imports nothing but argparse: it is built for every command."""

from __future__ import annotations

import argparse


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """`hf-to-megatron`, `megatron-to-hf`, `inspect`, `verify` and `diff`; the choice is in `what`."""
    sub = parser.add_subparsers(dest="what", required=True, metavar="WHAT")

    def add(name: str, help_text: str) -> argparse.ArgumentParser:
        return sub.add_parser(name, help=help_text, description=help_text)

    p = add("hf-to-megatron", "Write an HF checkpoint as a distributed checkpoint of Megatron-Core, for any layout.")
    p.add_argument("source", metavar="HF_DIR", help="directory with config.json and safetensors files")
    p.add_argument("out", metavar="OUT", help="directory to make")
    _mtp(p)
    p.add_argument(
        "--layer-keys",
        choices=("separate", "stacked"),
        help="one key for each layer, or one tensor for all of them, as Megatron-Core has it where `moe_layer_freq` is "
        "a number (default: stacked for dense models)",
    )
    _workers(p)

    p = add("megatron-to-hf", "Write the weights of a distributed checkpoint of Megatron-Core as an HF checkpoint.")
    p.add_argument("source", metavar="CHECKPOINT", help="directory with metadata.json and .distcp files")
    p.add_argument("out", metavar="OUT", help="directory to make")
    _config(p)
    _mtp(p)
    p.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type to write (default: as converted; of a checkpoint that Megatron-Core wrote, the config's type)",
    )
    p.add_argument(
        "--form",
        choices=("plain", "fp8"),
        default="plain",
        help="`fp8` writes the weights that were published in FP8 so again (default: plain)",
    )
    p.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="largest file to write (default: 5)")
    _workers(p)

    p = add("inspect", "Show what a checkpoint of either kind holds, and whether it is whole.")
    p.add_argument("path", metavar="PATH")
    p.add_argument("--keys", action="store_true", help="every key, not only every kind of key")
    _config(p)
    _mtp(p)

    p = add(
        "verify",
        "Check by its headers that a checkpoint is whole; with a second one, that their weights are equal bit by bit.",
    )
    p.add_argument("a", metavar="A")
    p.add_argument("b", metavar="B", nargs="?", help="of the same or the other kind")
    _config(p)
    _mtp(p)
    _workers(p)

    p = add("diff", "Show how the weights of two checkpoints of any kinds differ; exit code 1 if they do.")
    p.add_argument("a", metavar="A")
    p.add_argument("b", metavar="B")
    _config(p)
    _mtp(p)
    _workers(p)


def _mtp(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--mtp", choices=("keep", "drop"), help="what becomes of multi-token-prediction layers, if there are"
    )


def _config(p: argparse.ArgumentParser) -> None:
    p.add_argument("--config", metavar="HF_DIR", help="where config.json and tokenizer are, if not in the checkpoint")


def _workers(p: argparse.ArgumentParser) -> None:
    p.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each core)")
