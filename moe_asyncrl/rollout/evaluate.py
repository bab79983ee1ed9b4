"""Greedy evaluation on held-out prompts.

`accuracy` is the mean reward of the prompts that could be scored: for the built-in rules the share of right answers,
for a function of the user's own its mean `total`. Prompts that could not be scored are counted apart, not as 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.groups import jobs_for, usable
from moe_asyncrl.rollout.prompts import ReadyPrompts
from moe_asyncrl.scoring.score import TOTAL, Score
from moe_asyncrl.scoring.scorer import Scorer

LIST = 64
"""Prompts in one request: few enough that a rollout's list gets its turn in between."""
LISTS_AT_ONCE = 4

Generate = Callable[[Sequence[GenerateRequest]], Awaitable[list[Completion]]]


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """What an evaluation came to."""

    version: int
    """Committed policy version at submission."""
    newest_version: int
    """Newest version that sampled a token: above `version` where the weights changed meanwhile."""
    accuracy: float
    n: int
    """Prompts that were scored."""
    failed: int
    tokens: int
    """Sampled tokens, all prompts together."""
    seconds: float
    accuracy_by_source: dict[str, float] = dataclasses.field(default_factory=dict)
    """By the names of the sources; empty where they have none."""

    def metrics(self) -> dict[str, Any]:
        """The `eval` line of metrics.jsonl."""
        fields = dataclasses.asdict(self)
        if not self.accuracy_by_source:
            del fields["accuracy_by_source"]
        return {"kind": "eval", "time": time.time(), **fields}


def _by_source(scored: Sequence[tuple[str, float]]) -> dict[str, float]:
    names = sorted({name for name, _ in scored if name})
    found = {name: [total for of, total in scored if of == name] for name in names}
    return {name: sum(totals) / len(totals) for name, totals in found.items()}


async def evaluate(
    prompts: ReadyPrompts, generate: Generate, tokenizer: Tokenizer, scorer: Scorer, *, version: int, tag: str = "eval"
) -> EvalResult:
    """One greedy answer for each prompt. `tag` begins the requests' names and is unique among running evaluations.

    Raises UserError if not one prompt could be scored, and what `generate` and `scorer` raise.
    """
    begun = time.monotonic()
    slots = asyncio.Semaphore(LISTS_AT_ONCE)

    async def part(start: int) -> tuple[list[Completion], list[tuple[str, Score]]]:
        async with slots:
            ready = [prompts[i] for i in range(start, min(start + LIST, len(prompts)))]
            completions = await generate(
                [
                    GenerateRequest(
                        rid=f"{tag}-{version}-{start + i}",
                        input_ids=p.ids,
                        sampling=SamplingParams(temperature=0.0, max_new_tokens=p.max_new_tokens),
                        version=version,
                        stop_token_ids=tokenizer.eos_ids,
                    )
                    for i, p in enumerate(ready)
                ]
            )
        good = [(p, c) for p, c in zip(ready, completions, strict=True) if usable(c)]
        jobs = [job for p, c in good for job in jobs_for(p, [c], tokenizer)]
        names = [p.prompt.name for p, _ in good]
        return completions, list(zip(names, await scorer.score(jobs), strict=True))

    done = await asyncio.gather(*(part(i) for i in range(0, len(prompts), LIST)))
    completions = [c for part_, _ in done for c in part_]
    scored = [(name, s.rewards[TOTAL]) for _, scores in done for name, s in scores if s.status == "ok"]
    totals = [total for _, total in scored]
    if not totals:
        last = next((s.detail for _, scores in done for _, s in scores), "no completion came back whole")
        raise UserError(f"evaluation: none of {len(prompts)} answers could be scored; one reason: {last}")
    return EvalResult(
        version=version,
        newest_version=max((int(c.versions.max()) for c in completions if len(c.versions)), default=version),
        accuracy=sum(totals) / len(totals),
        n=len(totals),
        failed=len(prompts) - len(totals),
        tokens=sum(len(c.output_ids) for c in completions),
        seconds=time.monotonic() - begun,
        accuracy_by_source=_by_source(scored),
    )


async def evaluate_at(url: str, recipe: Recipe, *, api_key: str | None = None) -> EvalResult:
    """Evaluate the model that a server at `url` serves, on the recipe's held-out file.

    Raises UserError for a recipe without one, bad data, a bad reward function, or an engine that fails.
    """
    from moe_asyncrl.engine.client import EngineClient
    from moe_asyncrl.rollout.prompts import eval_prompts, reward_functions
    from moe_asyncrl.scoring.scorer import search_folders

    tokenizer = Tokenizer.load(recipe.model.path)
    prompts = eval_prompts(recipe, tokenizer)
    if prompts is None:
        raise UserError("data.eval is not set: there is nothing to evaluate on")
    scorer = await Scorer.start(
        recipe.reward, search=search_folders(recipe.reward), functions=reward_functions(recipe, train=False)
    )
    try:
        async with EngineClient(url, name="engine", api_key=api_key) as client:

            async def generate(requests: Sequence[GenerateRequest]) -> list[Completion]:
                return await client.generate(requests, deadline_s=recipe.engine.request_timeout_s)

            return await evaluate(prompts, generate, tokenizer, scorer, version=-1)
    finally:
        await scorer.close()


def evaluate_model(recipe: Recipe, *, cpu: bool, log_path: Path) -> EvalResult:
    """Start a server for `recipe.model.path`, evaluate it on `data.eval`, stop the server.

    For use outside an event loop. Raises UserError; data and reward are checked before the server is started.
    """
    import secrets

    from moe_asyncrl.engine.arguments import engine_args
    from moe_asyncrl.engine.server import Server
    from moe_asyncrl.rollout.preflight import check_eval

    check_eval(recipe)
    key = secrets.token_hex(16)
    # Not a port of the recipe's: a run may be using those.
    args = msgspec.structs.replace(engine_args(recipe, 0, cpu=cpu, api_key=key), port=0)
    with Server.start(args, cpu=cpu, log_path=log_path, name="engine") as server:
        server.wait_ready(recipe.engine.start_timeout_s)
        return asyncio.run(evaluate_at(server.url, recipe, api_key=key))
