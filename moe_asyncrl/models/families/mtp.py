"""Multi-token-prediction layers, as DeepSeek-V3 and GLM-4.5 store them: one more layer each behind the last.

HF keeps in `model.layers.<number of layers + i>.` a whole layer, two norms and a projection in front of it, and own
copies of the embedding and the output layer, which equal the model's. Megatron-Core's names are those of
`megatron/core/transformer/multi_token_prediction.py`; it has no such copies: their names
(`mtp_copy.`) are this project's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moe_asyncrl.models.algebra import Copy, HfTensor
from moe_asyncrl.models.families import blocks, moe_blocks
from moe_asyncrl.models.families.blocks import At
from moe_asyncrl.models.parameter_map import Entry, Place
from moe_asyncrl.models.spec import ModelSpec


def model(spec: ModelSpec, attention: Callable[[ModelSpec, At], Iterator[Entry]]) -> Iterator[Entry]:
    """All parameters of a model with dense and MoE layers, in export order; the kept layers follow its own."""

    def layer(at: At, moe: bool) -> Iterator[Entry]:
        yield from attention(spec, at)
        yield from moe_blocks.moe_mlp(spec, at) if moe else blocks.dense_mlp(spec, at)

    yield from blocks.embedding(spec)
    for number, moe in enumerate(spec.moe_layers):
        yield from layer(blocks.decoder_layer(number), moe)
    yield from blocks.head(spec)
    yield from layers(spec, lambda at: layer(at, moe=True))
    yield from moe_blocks.float32_routers(spec)
    yield from expert_biases(spec)


def layers(spec: ModelSpec, inner: Callable[[At], Iterator[Entry]]) -> Iterator[Entry]:
    """The kept layers in export order; `inner` gives the parameters of the layer inside."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    for number in range(spec.kept_mtp_layers):
        mine, theirs = f"mtp.layers.{number}.", _theirs(spec, number)
        for name, hf_name, shape, axis in (
            ("mtp_copy.embedding.weight", "embed_tokens.weight", (vocab, hidden), None),
            (mine + "enorm.weight", "enorm.weight", (hidden,), None),
            (mine + "hnorm.weight", "hnorm.weight", (hidden,), None),
            (mine + "eh_proj.weight", "eh_proj.weight", (hidden, 2 * hidden), 0),
            (mine + "final_layernorm.weight", "shared_head.norm.weight", (hidden,), None),
            ("mtp_copy.output_layer.weight", "shared_head.head.weight", (vocab, hidden), None),
        ):
            if name.startswith("mtp_copy."):
                name = name.replace("mtp_copy.", f"mtp_copy.{number}.")
            yield Entry(name=name, op=Copy(HfTensor(theirs + hf_name, shape)), shard_axis=axis, place=Place.LAST)
        yield from inner(_at(spec, number))


def expert_biases(spec: ModelSpec) -> Iterator[Entry]:
    """The kept layers' expert biases."""
    for number in range(spec.kept_mtp_layers):
        yield moe_blocks.expert_bias(spec, _at(spec, number))


def is_of_mtp(spec: ModelSpec, name: str) -> bool:
    """Whether an HF tensor belongs to a multi-token-prediction layer that the config announces."""
    return any(name.startswith(_theirs(spec, number)) for number in range(spec.mtp_layers))


def _at(spec: ModelSpec, number: int) -> At:
    return At(mine=f"mtp.layers.{number}.transformer_layer.", theirs=_theirs(spec, number), place=Place.LAST)


def _theirs(spec: ModelSpec, number: int) -> str:
    return f"model.layers.{spec.num_layers + number}."
