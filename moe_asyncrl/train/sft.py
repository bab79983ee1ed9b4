"""Supervised examples: a prompt and its answer, of which the answer's tokens and the closing one are trained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from moe_asyncrl.algorithms.aggregation import Aggregation, token_weights
from moe_asyncrl.config.recipe import Source
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompts import Prompt
from moe_asyncrl.data.sources.opening import open_prompts
from moe_asyncrl.models.tokenizer import Chat, Tokenizer
from moe_asyncrl.train.batch import MicroBatch, Sample, make_micro_batch
from moe_asyncrl.train.passes import ModelOnRank
from moe_asyncrl.train.plan import packing_for

REMEMBERED_TOKENS = 1 << 22
"""Bound on the tokens of examples that are kept encoded."""


class Examples:
    """Batches of examples from sources. A step's batch is a function of the step: nothing to save or restore."""

    def __init__(
        self,
        entry: str | Path | tuple[Source, ...],
        tokenizer: Tokenizer,
        *,
        max_context: int,
        seed: int,
        shuffle: bool,
        chat: Chat,
        check_all: bool = True,
    ) -> None:
        """Opens and checks the sources; with `check_all` every example is encoded once, which one rank need do.

        Raises:
            UserError: names file and line, or row: malformed, without an answer, too long, or not to be encoded.
        """

        def check(prompt: Prompt) -> None:
            encode_example(prompt, tokenizer, chat, max_context)

        self._file = open_prompts(
            str(entry) if isinstance(entry, Path) else entry,
            use="train",
            seed=seed,
            check=check if check_all else _needs_answer,
            every_row=check_all,
        )
        self._order = self._file.order(seed=seed, shuffle=shuffle)
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._chat: Chat = chat
        self._encoded: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._kept = 0

    def __len__(self) -> int:
        """Examples in the sources."""
        return len(self._file)

    def batch(self, step: int, size: int, aggregation: Aggregation = "token_mean") -> list[Sample]:
        """The examples of step `step` (from 0); over the batch, the weights of trained tokens sum to 1.

        Raises:
            UserError: names file and line: an example longer than the context, or one that cannot be encoded.
        """
        places = [self._order.at(i) for i in range(step * size, (step + 1) * size)]
        pairs = [self._example(position) for _, position in places]
        weights = token_weights(torch.tensor([int(trained.sum()) for _, trained in pairs]), aggregation).tolist()
        return [
            Sample(name=f"example {position} of epoch {epoch}", tokens=tokens, trained=trained, weight=weight)
            for (epoch, position), (tokens, trained), weight in zip(places, pairs, weights, strict=True)
        ]

    def _example(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        found = self._encoded.get(position)
        if found is None:
            found = encode_example(self._file[position], self._tokenizer, self._chat, self._max_context)
            self._encoded[position] = found
            self._kept += len(found[0])
            while self._kept > REMEMBERED_TOKENS and len(self._encoded) > 1:
                self._kept -= len(self._encoded.popitem(last=False)[1][0])
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def encode_example(prompt: Prompt, tokenizer: Tokenizer, chat: Chat, max_context: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [T], trained bool [T]): the prompt as sampling would start from it, the answer, the closing token.

    Raises:
        UserError: names file and line: no answer, cannot be encoded, or longer than `max_context`.
    """
    _needs_answer(prompt)
    start = tokenizer.encode_prompt(prompt, chat)
    answer = tokenizer.encode_answer(prompt.answer or "", prompt.source)
    n = len(start) + len(answer)
    if n > max_context:
        raise UserError(
            f"{prompt.source}: prompt and answer have {n} tokens, model.max_context is {max_context}; "
            "shorten them or raise it"
        )
    trained = np.zeros(n, dtype=np.bool_)
    trained[len(start) :] = True
    return np.asarray([*start, *answer], dtype=np.int32), trained


def micro_batches_of(model: ModelOnRank, samples: Sequence[Sample], *, micro_batch_tokens: int) -> list[MicroBatch]:
    """This rank's micro-batches of samples that every rank has; without routing rows."""
    packing = packing_for([len(s.tokens) - 1 for s in samples], model.layout, micro_batch_tokens=micro_batch_tokens)
    mine = packing.ranks[model.layout.coordinates(model.rank).dp]
    return [
        make_micro_batch([samples[i] for i in numbers], layout=model.layout, device=model.device, rank=model.rank)
        for numbers in mine
    ]


def _needs_answer(prompt: Prompt) -> None:
    if prompt.answer is None:
        raise UserError(f"{prompt.source}: supervised learning needs an `answer`")
