"""Multi-token-prediction layers, in the forms in which checkpoints store them (`MtpForm`).

Behind the last layer (DeepSeek-V3, GLM-4.5): HF keeps in `model.layers.<number of layers + i>.` a whole layer, two
norms and a projection in front of it, and own copies of the embedding and the output layer, which equal the model's and
may be left out. Under `mtp.` (Qwen3-Next and its like): the layer is `mtp.layers.0.`, norms and projection stand beside
it, and there are no copies. In either, experts are stored one by one or stacked. Megatron-Core's names are those of
`megatron/core/transformer/multi_token_prediction.py`; it has no such copies: their names (`mtp_copy.`) are this
project's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import Copy, HfTensor
from moe_asyncrl.models.families import blocks, moe_blocks
from moe_asyncrl.models.families.blocks import At
from moe_asyncrl.models.parameter_map import Entry, Place
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.stored_names import MTP_PREFIX, mtp_prefixes


def model(spec: ModelSpec, attention: Callable[[ModelSpec, At], Iterator[Entry]]) -> Iterator[Entry]:
    """All parameters of a model with dense and MoE layers, in export order; the kept layers follow its own."""

    def layer(at: At, moe: bool, *, stacked: bool = False) -> Iterator[Entry]:
        yield from attention(spec, at)
        yield from moe_blocks.moe_mlp(spec, at, stacked=stacked) if moe else blocks.dense_mlp(spec, at)

    yield from blocks.embedding(spec)
    for number, moe in enumerate(spec.moe_layers):
        yield from layer(blocks.decoder_layer(number), moe)
    yield from blocks.head(spec)
    yield from layers(spec, lambda at: layer(at, moe=True, stacked=spec.mtp_form.stacked))
    yield from moe_blocks.float32_routers(spec)
    yield from expert_biases(spec)


def layers(spec: ModelSpec, inner: Callable[[At], Iterator[Entry]]) -> Iterator[Entry]:
    """The kept layers in export order; `inner` gives the parameters of the layer inside.

    Raises UserError for more than one layer under `mtp.`, which would share their norms and projection.
    """
    if spec.mtp_form.own_prefix and spec.kept_mtp_layers > 1:
        raise UserError(
            f"{spec.family}: {spec.kept_mtp_layers} multi-token-prediction layers under `{MTP_PREFIX}`: only one can "
            "be kept in that form; say `drop`"
        )
    for number in range(spec.kept_mtp_layers):
        for name, hf_name, shape, axis in _around(spec, number):
            yield Entry(name=name, op=Copy(HfTensor(hf_name, shape)), shard_axis=axis, place=Place.LAST)
        yield from inner(_at(spec, number))


def expert_biases(spec: ModelSpec) -> Iterator[Entry]:
    """The kept layers' expert biases."""
    for number in range(spec.kept_mtp_layers):
        yield moe_blocks.expert_bias(spec, _at(spec, number))


def is_of_mtp(spec: ModelSpec, name: str) -> bool:
    """Whether an HF tensor is of a multi-token-prediction layer: one that the config announces, or under `mtp.`."""
    return name.startswith(mtp_prefixes(spec.num_layers, spec.mtp_layers))


def described(spec: ModelSpec, names: Collection[str]) -> str:
    """For messages: how many such tensors there are, and where."""
    behind = any(not name.startswith(MTP_PREFIX) for name in names)
    place = f"behind layer {spec.num_layers - 1}" if behind else f"under `{MTP_PREFIX}`"
    return f"{len(names)} tensors of multi-token-prediction layers ({place})"


def _around(spec: ModelSpec, number: int) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
    """What stands around the layer: Megatron name, HF name, shape, sharded axis."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    mine, theirs = f"mtp.layers.{number}.", _theirs(spec, number)
    enorm, hnorm, projection, norm = (
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        if spec.mtp_form.own_prefix
        else (theirs + "enorm", theirs + "hnorm", theirs + "eh_proj", theirs + "shared_head.norm")
    )
    if spec.mtp_form.copies:
        yield f"mtp_copy.{number}.embedding.weight", theirs + "embed_tokens.weight", (vocab, hidden), None
    yield mine + "enorm.weight", enorm + ".weight", (hidden,), None
    yield mine + "hnorm.weight", hnorm + ".weight", (hidden,), None
    yield mine + "eh_proj.weight", projection + ".weight", (hidden, 2 * hidden), 0
    yield mine + "final_layernorm.weight", norm + ".weight", (hidden,), None
    if spec.mtp_form.copies:
        yield f"mtp_copy.{number}.output_layer.weight", theirs + "shared_head.head.weight", (vocab, hidden), None


def _at(spec: ModelSpec, number: int) -> At:
    return At(mine=f"mtp.layers.{number}.transformer_layer.", theirs=_theirs(spec, number), place=Place.LAST)


def _theirs(spec: ModelSpec, number: int) -> str:
    if spec.mtp_form.own_prefix:
        return f"{MTP_PREFIX}layers.{number}."
    return f"model.layers.{spec.num_layers + number}."
