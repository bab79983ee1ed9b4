"""The recipe: one YAML file, typed. Every field has a unit, a default, a bound and one sentence.

The sentence is the `description` of the field's `Meta`; `moe-asyncrl config schema` prints them all.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: fields by name only, no unknown key."""


class Run(Section, frozen=True, kw_only=True):
    """The run as a whole."""

    name: Annotated[str, Meta(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run; part of its folder's name.")] = "run"
    folder: Annotated[str, Meta(min_length=1, description="Folder that holds the run folders; relative to the working directory.")] = "runs"
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1, description="Seed of prompt order, initialisation and sampling.")] = 0
    steps: Annotated[int, Meta(ge=1, description="Optimizer steps of reinforcement learning (or of supervised learning, by `algorithm.objective`).")] = 100
    resume: Annotated[bool, Meta(description="Go on from the newest complete checkpoint of the run folder, if it has one.")] = False


class Model(Section, frozen=True, kw_only=True):
    """The policy."""

    path: Annotated[str, Meta(min_length=1, description="HF directory: config.json, safetensors, tokenizer.")]
    dtype: Annotated[Literal["float32", "bfloat16"], Meta(description="Element type of the trainer's forward pass.")] = "float32"
    max_context: Annotated[int, Meta(ge=8, le=2**22, description="Longest trajectory, prompt included, in tokens.")] = 1024


class Data(Section, frozen=True, kw_only=True):
    """Prompts."""

    train: Annotated[str, Meta(min_length=1, description="JSONL file: `prompt` (text) or `messages` (chat), `answer`, any metadata.")]
    eval: Annotated[str | None, Meta(description="JSONL file of held-out prompts; no evaluation without it.")] = None
    shuffle: Annotated[bool, Meta(description="Shuffle the training prompts anew each epoch, by the run's seed.")] = True
    chat: Annotated[Literal["auto", "never"], Meta(description="`auto` renders `messages` with the tokenizer's chat template; `prompt` is never wrapped.")] = "auto"


class Rollout(Section, frozen=True, kw_only=True):
    """Sampling."""

    groups_per_step: Annotated[int, Meta(ge=1, description="Prompt groups in one training batch.")] = 32
    group_size: Annotated[int, Meta(ge=1, le=4096, description="Samples for each prompt.")] = 8
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**20, description="Longest answer, in tokens.")] = 256
    max_new_tokens_field: Annotated[str | None, Meta(description="Metadata field of a prompt that sets its own longest answer, in tokens.")] = None
    ignore_eos: Annotated[bool, Meta(description="Sample until the longest answer is reached, whatever the model says (for measurements).")] = False
    temperature: Annotated[float, Meta(gt=0, le=10, description="Sampling temperature; must be above 0, as training divides by it.")] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="Keep the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Keep the likeliest tokens up to this probability; 1 keeps all.")] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1, description="Keep tokens above this fraction of the likeliest one's probability; 0 keeps all.")] = 0.0
    concurrent_groups: Annotated[int, Meta(ge=1, description="Groups that one rollout worker has under way at once.")] = 64
    groups_per_request: Annotated[int, Meta(ge=1, description="Groups sent to an engine in one list.")] = 8
    filter_uniform: Annotated[bool, Meta(description="Drop groups whose rewards are all equal: they have no gradient.")] = False


class Reward(Section, frozen=True, kw_only=True):
    """Scoring."""

    function: Annotated[str, Meta(min_length=1, description="`exact`, `numeric`, or `module:function` of your own (sync or async).")] = "exact"
    timeout_s: Annotated[float, Meta(gt=0, description="Longest time for one completion, in seconds; then it counts as failed, not as 0.")] = 10.0
    workers: Annotated[int, Meta(ge=1, le=256, description="Processes that run your function.")] = 1
    max_consecutive_failures: Annotated[int, Meta(ge=1, description="Stop the run when this many completions in a row could not be scored.")] = 256


class Engine(Section, frozen=True, kw_only=True):
    """SGLang servers."""

    count: Annotated[int, Meta(ge=1, le=4096, description="Number of servers.")] = 1
    tp: Annotated[int, Meta(ge=1, description="Tensor parallelism of one server, in ranks.")] = 1
    ep: Annotated[int, Meta(ge=1, description="Expert parallelism of one server, in ranks; divides `tp`.")] = 1
    dtype: Annotated[Literal["float32", "bfloat16"], Meta(description="Element type of the servers' weights and of the weights sent to them.")] = "bfloat16"
    python: Annotated[str | None, Meta(description="Python interpreter of the servers, if SGLang lives in another environment.")] = None
    host: Annotated[str, Meta(min_length=1, description="Address that the servers listen on.")] = "127.0.0.1"
    base_port: Annotated[int, Meta(ge=0, le=65000, description="Port of the first server, the next ones follow; 0 lets the system choose.")] = 0
    max_running_requests: Annotated[int, Meta(ge=1, description="Sequences that one server runs at once.")] = 256
    max_total_tokens: Annotated[Annotated[int, Meta(ge=64)] | None, Meta(description="Tokens in one server's KV cache; the server decides if not given (on CPU: 65,536).")] = None
    start_timeout_s: Annotated[float, Meta(gt=0, description="Longest start of a server, in seconds.")] = 300.0
    request_timeout_s: Annotated[float, Meta(gt=0, description="Longest time for one generation request, in seconds.")] = 600.0
    restarts: Annotated[int, Meta(ge=0, description="Times that a server that died is started again.")] = 2
    extra_args: Annotated[tuple[str, ...], Meta(description="Further arguments for `sglang.launch_server`.")] = ()


class Trainer(Section, frozen=True, kw_only=True):
    """Megatron-Core."""

    tp: Annotated[int, Meta(ge=1, description="Tensor parallelism, in ranks.")] = 1
    pp: Annotated[int, Meta(ge=1, description="Pipeline parallelism, in stages.")] = 1
    vpp: Annotated[Annotated[int, Meta(ge=2)] | None, Meta(description="Virtual pipeline chunks for each stage.")] = None
    cp: Annotated[int, Meta(ge=1, description="Context parallelism, in ranks.")] = 1
    ep: Annotated[int, Meta(ge=1, description="Expert parallelism, in ranks.")] = 1
    etp: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Tensor parallelism inside experts, in ranks; as `tp` if not given.")] = None
    dp: Annotated[int, Meta(ge=1, description="Data parallelism, in replicas of the dense part; experts are spread over it.")] = 1
    micro_batch_tokens: Annotated[int, Meta(ge=8, description="Longest packed micro-batch on one rank, in tokens.")] = 8192
    recompute: Annotated[Literal["off", "selective", "full"], Meta(description="What of the forward pass is computed again in the backward pass.")] = "off"
    threads: Annotated[int, Meta(ge=1, description="CPU threads of one trainer rank.")] = 1
    timeout_s: Annotated[float, Meta(gt=0, description="Longest collective between trainer ranks, in seconds.")] = 600.0


class Optimizer(Section, frozen=True, kw_only=True):
    """AdamW."""

    lr: Annotated[float, Meta(gt=0, le=1, description="Peak learning rate.")] = 1e-6
    beta1: Annotated[float, Meta(ge=0, lt=1, description="Decay of the first moment.")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="Decay of the second moment.")] = 0.95
    eps: Annotated[float, Meta(gt=0, description="Added to the root of the second moment.")] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0, description="Decoupled weight decay.")] = 0.0
    clip_grad: Annotated[float, Meta(ge=0, description="Largest gradient norm; 0 does not clip.")] = 1.0
    schedule: Annotated[Literal["constant", "linear", "cosine"], Meta(description="Learning rate after the warm-up.")] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up from 0.")] = 0
    min_lr_ratio: Annotated[float, Meta(ge=0, le=1, description="Last learning rate over the peak.")] = 0.0


class Algorithm(Section, frozen=True, kw_only=True):
    """The objective."""

    objective: Annotated[Literal["grpo", "sft"], Meta(description="`grpo`: group-relative policy optimisation; `sft`: supervised learning on `answer`.")] = "grpo"
    clip_low: Annotated[float, Meta(ge=0, lt=1, description="The ratio is clipped below 1 - clip_low.")] = 0.2
    clip_high: Annotated[float, Meta(ge=0, description="The ratio is clipped above 1 + clip_high.")] = 0.28
    importance_cap: Annotated[float, Meta(ge=0, description="Cap of the truncated importance weight against the sampler; 0 turns the correction off.")] = 2.0
    normalize_std: Annotated[bool, Meta(description="Divide advantages by the group's standard deviation.")] = True
    aggregation: Annotated[Literal["token_mean", "sequence_mean"], Meta(description="Mean over all sampled tokens, or mean over sequences of their token means.")] = "token_mean"
    updates_per_batch: Annotated[int, Meta(ge=1, le=64, description="Optimizer updates that one batch is split into.")] = 1


class Warmup(Section, frozen=True, kw_only=True):
    """Supervised steps before reinforcement learning starts."""

    steps: Annotated[int, Meta(ge=0, description="Supervised optimizer steps; 0 for none.")] = 0
    data: Annotated[str | None, Meta(description="JSONL file with `prompt` or `messages`, and `answer`; the training file if not given.")] = None
    batch_size: Annotated[int, Meta(ge=1, description="Examples in one step.")] = 128
    lr: Annotated[float, Meta(gt=0, le=1, description="Peak learning rate of these steps.")] = 1e-3


class Weights(Section, frozen=True, kw_only=True):
    """Weight updates from trainer to engines."""

    backend: Annotated[Literal["auto", "nccl", "gloo"], Meta(description="Transport; `auto` takes NCCL where both sides have it.")] = "auto"
    interrupt: Annotated[Literal["in_flight"], Meta(description="What happens to running requests: `in_flight` pauses them in place and goes on with new weights.")] = "in_flight"
    every: Annotated[int, Meta(ge=1, description="Trainer steps between updates.")] = 1
    bucket_mib: Annotated[int, Meta(ge=1, le=16384, description="Size of a bucket, in MiB.")] = 64
    host: Annotated[str, Meta(min_length=1, description="Address of the trainer's rank 0 that engines connect to.")] = "127.0.0.1"
    timeout_s: Annotated[float, Meta(gt=0, description="Longest single step of an update, in seconds.")] = 120.0


class Buffer(Section, frozen=True, kw_only=True):
    """The bounded queue between rollout and training."""

    capacity_groups: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Most groups held; what the staleness bound allows if not given.")] = None
    max_staleness: Annotated[int, Meta(ge=0, description="Most versions between a trajectory's oldest token and the weights that train on it.")] = 2
    max_attempts: Annotated[int, Meta(ge=1, description="Times that a prompt is sampled anew after its group failed or went stale.")] = 2
    wait_s: Annotated[float, Meta(gt=0, description="Longest wait of the trainer for a batch, in seconds.")] = 900.0


class Replay(Section, frozen=True, kw_only=True):
    """Routing replay."""

    mode: Annotated[Literal["r3", "off"], Meta(description="`r3`: the sampler's experts drive the trainer; `off`: the trainer routes for itself.")] = "r3"
    allow_missing: Annotated[bool, Meta(description="Route rows that the sampler did not report live, instead of stopping.")] = False
    probe_every: Annotated[int, Meta(ge=0, description="Steps between measurements of the trainer-sampler KL with and without replay; 0 for none.")] = 10
    probe_prompts: Annotated[int, Meta(ge=1, description="Prompts in that measurement.")] = 16


class Checkpoint(Section, frozen=True, kw_only=True):
    """The trainer's checkpoints."""

    every: Annotated[int, Meta(ge=0, description="Steps between checkpoints; 0 writes only the last one.")] = 0
    keep: Annotated[int, Meta(ge=1, description="Complete checkpoints kept.")] = 2


class Eval(Section, frozen=True, kw_only=True):
    """Evaluation on held-out prompts, greedy."""

    every: Annotated[int, Meta(ge=0, description="Steps between evaluations; 0 evaluates before and after only.")] = 20
    max_prompts: Annotated[int, Meta(ge=1, description="Prompts evaluated, from the start of the file.")] = 200
    max_new_tokens: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Longest answer, in tokens; as in training if not given.")] = None


class Recipe(Section, frozen=True, kw_only=True):
    """Everything that a run is made from."""

    model: Model
    data: Data
    run: Run = field(default_factory=Run)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    engine: Engine = field(default_factory=Engine)
    trainer: Trainer = field(default_factory=Trainer)
    optimizer: Optimizer = field(default_factory=Optimizer)
    algorithm: Algorithm = field(default_factory=Algorithm)
    warmup: Warmup = field(default_factory=Warmup)
    weights: Weights = field(default_factory=Weights)
    buffer: Buffer = field(default_factory=Buffer)
    replay: Replay = field(default_factory=Replay)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    eval: Eval = field(default_factory=Eval)
