"""The names of all figures, what each means, and where it is found.

A table for each role: name without prefix, field of the record, help. Names end in a unit or in nothing, as Prometheus
advises; counters get their `_total` from its library.
"""

from __future__ import annotations

TRAINER = "moe_asyncrl_trainer_"
ROLLOUT = "moe_asyncrl_rollout_"
BUFFER = "moe_asyncrl_buffer_"
ENGINE = "moe_asyncrl_engine_"
ROLE = "moe_asyncrl_role_"

STEP: tuple[tuple[str, str, str], ...] = (
    ("step", "step", "Optimizer steps done."),
    ("reward", "reward", "Mean reward of the last batch."),
    ("reward_std", "reward_std", "Standard deviation of the rewards of the last batch."),
    ("loss", "loss", "Loss of the last step."),
    ("grad_norm", "grad_norm", "Gradient norm of the last step, before clipping."),
    ("learning_rate", "lr", "Learning rate of the last step."),
    ("entropy_nats", "entropy", "Mean entropy of the policy over the last batch."),
    ("clip_fraction", "clip_fraction", "Trained tokens whose ratio was clipped in the last step."),
    ("importance_capped", "importance_capped", "Trained tokens whose importance weight was cut in the last step."),
    ("staleness_mean", "staleness_mean", "Mean of the versions between trajectories and the weights they trained."),
    ("staleness_max", "staleness_max", "Most versions between a trajectory and the weights it trained."),
    ("coverage", "coverage", "Router rows that the sampler reported, of the last batch."),
    ("flip_rate", "flip_rate", "Router decisions that the trainer would have made otherwise, of the last batch."),
    ("tokens_per_second", "trained_tokens_per_s", "Trained tokens per second of the last step."),
    ("step_seconds", "step_seconds", "Forward, backward and optimizer of the last step."),
    ("turn_seconds", "turn_seconds", "The last step with its waiting and its update of the engines."),
    ("wait_seconds", "wait_seconds", "Waiting for the last batch."),
    ("update_seconds", "publish_seconds", "The last update of the engines' weights."),
    ("pause_seconds", "pause_seconds", "Standstill of the engines in the last update."),
    ("update_bytes", "publish_bytes", "Weights that each engine received in the last update."),
    ("engines", "engines", "Engines that the last update reached."),
)
"""From the newest record of kind `step`."""
STEP_SUMS: tuple[tuple[str, str, str], ...] = (
    ("steps", "", "Optimizer steps since the process started."),
    ("tokens", "tokens", "Trained tokens since the process started."),
    ("sequences", "sequences", "Trained sequences since the process started."),
)
PROBE: tuple[tuple[str, str, str], ...] = (
    ("kl_replay", "kl_replay", "KL between sampler and trainer at the last probe, with replayed routing."),
    ("kl_live", "kl_live", "The same with the trainer's own routing."),
    (
        "load_busiest_sampler",
        "load_busiest_sampler",
        "Tokens of the busiest expert over an even share: sampler.",
    ),
    ("load_busiest_trainer", "load_busiest_trainer", "The same by the trainer's own routing."),
    ("load_entropy_sampler", "load_entropy_sampler", "Evenness of the least even layer, 1 at most, by the sampler."),
    ("load_entropy_trainer", "load_entropy_trainer", "The same by the trainer's own routing."),
    ("idle_experts_sampler", "idle_experts_sampler", "Experts without a token at the last probe, by the sampler."),
    ("idle_experts_trainer", "idle_experts_trainer", "The same by the trainer's own routing."),
)
WARMUP: tuple[tuple[str, str, str], ...] = (
    ("warmup_step", "step", "Supervised steps done before reinforcement learning."),
    ("warmup_loss", "loss", "Loss of the last supervised step."),
)
RATES: tuple[tuple[str, str, str], ...] = (
    ("tokens_per_second", "sampled_tokens_per_s", "Sampled tokens per second, over the last seconds."),
    ("completions_per_second", "completions_per_s", "Completions per second, over the last seconds."),
    ("reward", "reward_mean", "Mean reward of the completions of the last seconds."),
    ("running_requests", "running_requests", "Requests that engines are working on."),
)
"""From the newest record of kind `rollout`."""
RATE_SUMS: tuple[tuple[str, str, str], ...] = (
    ("completions", "completions", "Completions since the process started."),
    ("completions_failed", "failed", "Completions without a score since the process started."),
    ("groups_held", "groups_held", "Groups that the buffer took since the process started."),
    ("groups_failed", "groups_failed", "Groups given up since the process started."),
    ("groups_filtered", "groups_filtered", "Groups dropped because their rewards were all equal."),
)
EVAL: tuple[tuple[str, str, str], ...] = (
    ("accuracy", "accuracy", "Mean reward of greedy answers to the held-out prompts, when last evaluated."),
    ("accuracy_version", "version", "Version that was last evaluated."),
)
PHASES = ("starting", "running", "finishing", "finished", "failed")
MEMBER_STATES = ("joining", "serving", "quarantined")
FATES = ("sampled", "trained", "stale", "filtered", "failed")
