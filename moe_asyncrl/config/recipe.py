"""The recipe: one YAML file, typed. Every field has a unit, a default, a bound and one sentence.

The sentence stands under the field; `moe-asyncrl config schema` prints them all.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: fields by name only, no unknown key."""


class Run(Section, frozen=True, kw_only=True):
    """The run as a whole."""

    name: Annotated[str, Meta(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")] = "run"
    """Name of the run; part of its folder's name."""
    folder: Annotated[str, Meta(min_length=1)] = "runs"
    """Folder that holds the run folders; relative to the working directory."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Seed of prompt order, initialisation and sampling."""
    steps: Annotated[int, Meta(ge=1)] = 100
    """Optimizer steps of reinforcement learning (or of supervised learning, by `algorithm.objective`)."""
    resume: bool = False
    """Go on from the newest complete checkpoint of the run folder, if it has one."""


class Model(Section, frozen=True, kw_only=True):
    """The policy."""

    path: Annotated[str, Meta(min_length=1)]
    """HF directory: config.json, safetensors, tokenizer."""
    reference: Annotated[str, Meta(min_length=1)] | None = None
    """HF directory of the model that the KL is measured against; the weights after any warm-up if not given."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the trainer's forward pass."""
    max_context: Annotated[int, Meta(ge=8, le=2**22)] = 1024
    """Longest trajectory, prompt included, in tokens."""
    mtp: Literal["unsaid", "drop", "keep"] = "unsaid"
    """Multi-token-prediction weights: `drop` leaves them out; `unsaid` refuses a checkpoint that has some."""


class Source(Section, frozen=True, kw_only=True):
    """One source of a mixture: a `path`, or a `reasoning_gym` task."""

    path: Annotated[str, Meta(min_length=1)] | None = None
    """JSONL or Parquet file, a folder or glob of them, or a folder of `datasets.save_to_disk`."""
    reasoning_gym: Annotated[str, Meta(min_length=1)] | None = None
    """Name of a reasoning-gym task, whose items are made by seed."""
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+$", max_length=64)] | None = None
    """Name in metrics and trajectories; the task's or the path's last part if not given."""
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Share of the prompts, relative to the other sources' weights."""
    split: Annotated[str, Meta(min_length=1)] | None = None
    """Split of a folder that has several, such as `train`."""
    prompt_field: Annotated[str, Meta(min_length=1)] | None = None
    """Field with the prompt's text; `prompt` if not given. `a.b` is field b of record a."""
    messages_field: Annotated[str, Meta(min_length=1)] | None = None
    """Field with the messages of a chat; `messages` if not given."""
    answer_field: Annotated[str, Meta(min_length=1)] | None = None
    """Field with the answer; `answer` if not given."""
    chat: bool = False
    """Make the prompt's text a user's message, so that the chat template wraps it."""
    system: str | None = None
    """System message before the prompt; makes it a chat."""
    instruction: str | None = None
    """Text put behind the prompt, on a line of its own."""
    reward: Annotated[str, Meta(min_length=1)] | None = None
    """Reward of this source; `reward.function` if not given, and `reasoning_gym` for a task."""
    config: dict[str, Any] = {}
    """Settings of the reasoning-gym task, such as `max_digits: 3`."""
    size: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """Items of the reasoning-gym task in one epoch."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Seed of the task's items; if not given, from the run's seed, and a fixed one for evaluation."""


Text = Annotated[str, Meta(min_length=1)]
Sources = Annotated[tuple[Source, ...], Meta(min_length=1, max_length=64)]


class Data(Section, frozen=True, kw_only=True):
    """Prompts."""

    train: Text | Sources
    """JSONL file (`prompt` or `messages`, `answer`, any metadata), any other path of a source, or a list of sources."""
    eval: Text | Sources | None = None
    """Held-out prompts, as a path or a list of sources; no evaluation without them."""
    shuffle: bool = True
    """Shuffle the training prompts anew each epoch, by the run's seed."""
    chat: Literal["auto", "never"] = "auto"
    """`auto` renders `messages` with the tokenizer's chat template; `prompt` is never wrapped."""


class Rollout(Section, frozen=True, kw_only=True):
    """Sampling."""

    groups_per_step: Annotated[int, Meta(ge=1)] = 32
    """Prompt groups in one training batch."""
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 8
    """Samples for each prompt."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 256
    """Longest answer, in tokens."""
    max_new_tokens_field: str | None = None
    """Metadata field of a prompt that sets its own longest answer, in tokens."""
    ignore_eos: bool = False
    """Sample until the longest answer is reached, whatever the model says (for measurements)."""
    temperature: Annotated[float, Meta(gt=0, le=10)] = 1.0
    """Sampling temperature; must be above 0, as training divides by it."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the likeliest tokens up to this probability; 1 keeps all. Set `top_k` (some hundreds) beside it where the
    vocabulary is large: what was kept travels with every token."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Keep tokens above this fraction of the likeliest one's probability; 0 keeps all."""
    concurrent_groups: Annotated[int, Meta(ge=1)] = 64
    """Groups that one rollout worker has under way at once."""
    groups_per_request: Annotated[int, Meta(ge=1)] = 8
    """Groups sent to an engine in one list."""
    filter_uniform: bool = False
    """Drop groups whose rewards are all equal: they have no gradient."""


class Reward(Section, frozen=True, kw_only=True):
    """Scoring."""

    function: Annotated[str, Meta(min_length=1)] = "exact"
    """`exact`, `numeric`, `math` (math-verify), `reasoning_gym` (the task's own), or `module:function` of your own."""
    folder: str | None = None
    """Folder in which your module is looked for first; the recipe's own if not given."""
    timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Longest time for one completion, in seconds; then it counts as failed, not as 0."""
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    """Processes that run your function."""
    max_consecutive_failures: Annotated[int, Meta(ge=1)] = 256
    """Stop the run when this many completions in a row could not be scored."""


class Engine(Section, frozen=True, kw_only=True):
    """SGLang servers."""

    count: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Number of servers."""
    tp: Annotated[int, Meta(ge=1)] = 1
    """Tensor parallelism of one server, in ranks."""
    ep: Annotated[int, Meta(ge=1)] = 1
    """Expert parallelism of one server, in ranks; divides `tp`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type of the servers' weights and of the weights sent to them."""
    python: str | None = None
    """Python interpreter of the servers, if SGLang lives in another environment."""
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address that the servers listen on."""
    base_port: Annotated[int, Meta(ge=0, le=65000)] = 0
    """Port of the first server, the next ones follow; 0 lets the system choose."""
    max_running_requests: Annotated[int, Meta(ge=1)] = 256
    """Sequences that one server runs at once."""
    max_total_tokens: Annotated[int, Meta(ge=64)] | None = None
    """Tokens in one server's KV cache; the server decides if not given (on CPU: 65,536)."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """Longest start of a server, in seconds."""
    request_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest time for one generation request, in seconds."""
    restarts: Annotated[int, Meta(ge=0)] = 2
    """Times that a server that died is started again."""
    colocated: bool = False
    """Trainer and servers share GPUs and take turns: servers give back their memory while the trainer trains."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for `sglang.launch_server`."""


class Trainer(Section, frozen=True, kw_only=True):
    """Megatron-Core."""

    tp: Annotated[int, Meta(ge=1)] = 1
    """Tensor parallelism, in ranks."""
    pp: Annotated[int, Meta(ge=1)] = 1
    """Pipeline parallelism, in stages."""
    vpp: Annotated[int, Meta(ge=2)] | None = None
    """Virtual pipeline chunks for each stage."""
    stage_layers: tuple[Annotated[int, Meta(ge=1)], ...] | None = None
    """Layers of each pipeline stage, `pp` times `vpp` numbers in the order of the layers; split evenly if not given."""
    cp: Annotated[int, Meta(ge=1)] = 1
    """Context parallelism, in ranks: each has 1 / cp of every sequence, padded to a multiple of 2 cp tokens."""
    ep: Annotated[int, Meta(ge=1)] = 1
    """Expert parallelism, in ranks."""
    etp: Annotated[int, Meta(ge=1)] | None = None
    """Tensor parallelism inside experts, in ranks; as `tp` if not given."""
    dp: Annotated[int, Meta(ge=1)] = 1
    """Data parallelism, in replicas of the dense part; experts are spread over it."""
    micro_batch_tokens: Annotated[int, Meta(ge=8)] = 8192
    """Longest packed micro-batch on one rank, in tokens."""
    recompute: Literal["off", "selective", "full"] = "off"
    """What of the forward pass is computed again in the backward pass."""
    threads: Annotated[int, Meta(ge=1)] = 1
    """CPU threads of one trainer rank."""
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest collective between trainer ranks, in seconds; at least twice `weights.timeout_s`."""


class Optimizer(Section, frozen=True, kw_only=True):
    """AdamW."""

    lr: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    """Peak learning rate."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Decoupled weight decay."""
    clip_grad: Annotated[float, Meta(ge=0)] = 1.0
    """Largest gradient norm; 0 does not clip."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Steps of linear warm-up from 0."""
    min_lr_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Last learning rate over the peak."""


class Algorithm(Section, frozen=True, kw_only=True):
    """The objective."""

    objective: Literal["grpo", "sft"] = "grpo"
    """`grpo`: group-relative policy optimisation; `sft`: supervised learning on `answer`."""
    clip_low: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Meta(ge=0)] = 0.28
    """The ratio is clipped above 1 + clip_high."""
    importance_cap: Annotated[float, Meta(ge=0)] = 2.0
    """Cap of the truncated importance weight against the sampler; 0 turns the correction off."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all sampled tokens, or mean over sequences of their token means."""
    updates_per_batch: Annotated[int, Meta(ge=1, le=64)] = 1
    """Optimizer updates that one batch is split into."""
    kl_coef: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    """Weight of the KL divergence to the reference model; 0 turns it off, and `model.reference` is only measured."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How that KL is estimated from sampled tokens; `k1` holds nothing back in the loss, only in the reward."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: added for each token; `reward`: its sum is taken off a trajectory's reward, for one more forward pass."""


class Warmup(Section, frozen=True, kw_only=True):
    """Supervised steps before reinforcement learning starts."""

    steps: Annotated[int, Meta(ge=0)] = 0
    """Supervised optimizer steps; 0 for none."""
    data: Text | Sources | None = None
    """Path or list of sources with `prompt` or `messages`, and `answer`; the training prompts if not given."""
    batch_size: Annotated[int, Meta(ge=1)] = 128
    """Examples in one step."""
    lr: Annotated[float, Meta(gt=0, le=1)] = 1e-3
    """Peak learning rate of these steps."""


class Weights(Section, frozen=True, kw_only=True):
    """Weight updates from trainer to engines."""

    transport: Literal["broadcast", "direct", "disk", "shared_memory"] = "broadcast"
    """`broadcast`: all weights to all; `direct`: each engine rank gets its slices; `disk`: files of a shared file
    system; `shared_memory`: all on one machine."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Of `broadcast` and `direct`; `auto` takes NCCL where both sides have it."""
    delta: Literal["off", "auto"] = "off"
    """`auto` sends only what has changed where that is less, and keeps a copy of what was sent in host memory."""
    delta_max_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Changes that take more than this of a full update's bytes are sent as a full one."""
    interrupt: Literal["in_flight", "retract"] = "in_flight"
    """Running requests go on with new weights: `in_flight` keeps their KV cache, `retract` computes it anew."""
    every: Annotated[int, Meta(ge=1)] = 1
    """Trainer steps between updates."""
    bucket_mib: Annotated[int, Meta(ge=1, le=16384)] = 64
    """Size of a bucket, in MiB."""
    depth: Annotated[int, Meta(ge=1, le=64)] = 2
    """Buckets in flight from each sender."""
    roots_per_stage: Annotated[int, Meta(ge=1, le=4096)] = 2
    """Most trainer ranks of a pipeline stage that broadcast, each over a process group of its own."""
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address of the trainer's rank 0 that engines connect to."""
    timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """Longest single step of an update, in seconds."""


class Buffer(Section, frozen=True, kw_only=True):
    """The bounded queue between rollout and training."""

    capacity_groups: Annotated[int, Meta(ge=1)] | None = None
    """Most groups held; what the staleness bound allows if not given."""
    max_staleness: Annotated[int, Meta(ge=0)] = 2
    """Most versions between a trajectory's oldest token and the weights that train on it."""
    max_attempts: Annotated[int, Meta(ge=1)] = 2
    """Times that a prompt is sampled anew after its group failed or went stale."""
    wait_s: Annotated[float, Meta(gt=0)] = 900.0
    """Longest wait of the trainer for a batch, in seconds."""
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address that the buffer listens on, encrypted and authenticated with keys made for the run."""


class Replay(Section, frozen=True, kw_only=True):
    """Routing replay."""

    mode: Literal["r3", "r2", "off"] = "r3"
    """`r3`: the sampler's experts drive the trainer; `r2`: those of the trainer's pass with the weights at the start of
    the batch drive its updates; `off`: the trainer routes for itself."""
    allow_missing: bool = False
    """Route rows that the sampler did not report live, instead of stopping."""
    other_version: Literal["use", "mask", "drop"] = "use"
    """Rows that other weights made than their token's: `use` them, `mask` those tokens in the loss, `drop` the
    trajectory."""
    probe_every: Annotated[int, Meta(ge=0)] = 10
    """Steps between measurements of the trainer-sampler KL with and without replay; 0 for none."""
    probe_prompts: Annotated[int, Meta(ge=1)] = 16
    """Prompts in that measurement."""


class Checkpoint(Section, frozen=True, kw_only=True):
    """The trainer's checkpoints."""

    every: Annotated[int, Meta(ge=0)] = 0
    """Steps between checkpoints; 0 writes only the last one."""
    asynchronous: bool = True
    """Train on while a checkpoint is written, from a copy of it in host memory; else wait for the disk."""
    keep: Annotated[int, Meta(ge=1)] = 2
    """Complete checkpoints kept."""
    keep_every: Annotated[int, Meta(ge=0)] = 0
    """Checkpoints of steps that are a multiple of this are kept as well, all of them; 0 for none."""


class Eval(Section, frozen=True, kw_only=True):
    """Evaluation on held-out prompts, greedy."""

    every: Annotated[int, Meta(ge=0)] = 20
    """Steps between evaluations; 0 evaluates before and after only."""
    max_prompts: Annotated[int, Meta(ge=1)] = 200
    """Prompts evaluated, from the start of the file; of several sources, from the start of each by its weight."""
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Longest answer, in tokens; as in training if not given."""


class Telemetry(Section, frozen=True, kw_only=True):
    """What a run shows of itself while it runs and afterwards."""

    console: Literal["auto", "plain"] = "auto"
    """`auto` draws a live panel where standard output is a terminal; `plain` prints lines everywhere."""
    record_groups_per_step: Annotated[int, Meta(ge=0, le=4096)] = 1
    """Groups of each trained batch that are kept whole in the run folder, for `moe-asyncrl samples`; 0 keeps none."""
    record_mib: Annotated[int, Meta(ge=1, le=2**20)] = 256
    """Most of the disk that they take, in MiB; the oldest ones are dropped."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    prometheus: bool = False
    """Serve figures of each role for Prometheus, and say where in the run folder's `endpoints/prometheus`."""
    prometheus_host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address that these listen on, without authentication; the system chooses the ports."""
    wandb: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """W&B project that the figures are sent to, if wandb is installed; none if not given."""
    mlflow: Annotated[str, Meta(min_length=1)] | None = None
    """MLflow tracking URI (an address or a database) that the figures are sent to, if mlflow is installed."""


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
    telemetry: Telemetry = field(default_factory=Telemetry)


def sources_of(recipe: Recipe) -> tuple[Source, ...]:
    """Every source that the recipe lists, for training, evaluation and warm-up; none where it names paths."""
    d = recipe.data
    return tuple(s for value in (d.train, d.eval, recipe.warmup.data) if isinstance(value, tuple) for s in value)
