"""Names that a configuration may use for what ships with this package, and where each is defined.

`base.importing.load_function` loads what a run's configuration names. Nothing else in a run's rooms knows the rooms
above it, so a reader of one run may leave out what its configuration does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

REWARDS = {
    "math": "megasync.integrations.math_verify:math_reward",
    "code": "megasync.coding.reward:CodeReward",
}

# Functions of a `DatasetConfig`. Those of READERS return rows that the configuration shapes, as it does those of files;
# those of TASKSETS return finished rows, and their reward function or None.
READERS = {
    "jsonl": "megasync.data.datasets:read_jsonl",
    "parquet": "megasync.data.datasets:read_parquet",
    "hf": "megasync.data.datasets:read_hf",
    "harbor": "megasync.integrations.harbor.tasks:harbor_rows",
}
TASKSETS = {
    "digits": "megasync.data.digits:digit_task",
    "reasoning_gym": "megasync.integrations.reasoning_gym:gym_rows",
    "verifiers": "megasync.integrations.verifiers.rows:verifiers_rows",
}

ENVIRONMENTS = {
    "reasoning_gym": "megasync.integrations.reasoning_gym:ReasoningGymTask",
    "harbor": "megasync.integrations.harbor.episode:HarborTask",
    "gymnasium": "megasync.integrations.gymnasium_text:GymnasiumText",
    "openenv": "megasync.integrations.openenv:OpenEnv",
    # It plays whole episodes: a workflow, not an Environment.
    "verifiers": "megasync.integrations.verifiers.workflow:VerifiersWorkflow",
}

# The value of `rollout.agent` with which programs outside of the run open sessions.
EXTERNAL = "external"

# What plays samples under `rollout.environment`, and under `rollout.agent` for a function and for EXTERNAL.
WORKFLOWS = {
    "environment": "megasync.environments.play:Play",
    "agent": "megasync.gateway.agent:AgentWorkflow",
    EXTERNAL: "megasync.gateway.external:ExternalAgents",
}

# The servers of `rollout.tools`.
TOOL_SERVERS = {"mcp": "megasync.integrations.mcp.server:McpServer"}

# Sinks of `observe`, called with their section, the configuration and the run directory.
TRACKERS = {
    "wandb": "megasync.integrations.trackers.wandb_sink:WandbSink",
    "mlflow": "megasync.integrations.trackers.mlflow_sink:MlflowSink",
}

CURRICULA = {"by_success": "megasync.data.curriculum:by_success"}


@dataclass(frozen=True)
class Algorithm:
    """An advantage estimator or a policy loss, and what it takes beside the data.

    It is the function of its name in `algorithms/advantages.py`, `algorithms/losses.py` or, if it ``chooses``,
    `algorithms/covariance.py`. ``keys`` are keys of the section `algorithm`, ``options`` its own options with their
    defaults. ``relative``: an estimator compares the samples of a group, so one of them is not enough. ``scores``: it
    compares the scores of each reward function by itself. ``tokens``: it takes the rewards of tokens and estimates
    their advantages. ``critic``: it takes the values of one, ``reference``: the log-ratios to the reference policy,
    ``baseline``: the rewards of greedy responses, ``norms``: the squared norms of gradients by logits.

    ``whole``: a loss has a gradient, or an effect on other tokens, also where the advantage is 0. ``chooses``: the
    function with the suffix ``_tokens`` says which tokens of a whole minibatch it treats apart; keys and options are
    those of both. ``responses``: all tokens of a response get the same gradient, so they must have the same advantage
    and weight. ``ratio``: it takes the ratio of policies. ``penalty``: it differs from the plain policy gradient by a
    penalty on that ratio alone.
    """

    keys: tuple[str, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    relative: bool = True
    scores: bool = False
    tokens: bool = False
    critic: bool = False
    baseline: bool = False
    norms: bool = False
    reference: bool = False
    whole: bool = False
    chooses: bool = False
    responses: bool = False
    ratio: bool = True
    penalty: bool = False


_CLIP = ("clip_low", "clip_high")

ADVANTAGES = {
    "grpo": Algorithm(("normalize_std",)),
    "grpo_passk": Algorithm(("normalize_std",)),
    "gdpo": Algorithm(("normalize_std",), scores=True),
    "rloo": Algorithm(),
    "opo": Algorithm(),
    "gpg": Algorithm(),
    "reinforce_plus_plus": Algorithm(relative=False),
    "reinforce_plus_plus_baseline": Algorithm(),
    "remax": Algorithm(relative=False, baseline=True),
    "grpo_process": Algorithm(("normalize_std",), tokens=True),
    "optimal_token_baseline": Algorithm(tokens=True, norms=True),
    "dpo": Algorithm(options={"beta": 0.1}, reference=True),
    "gae": Algorithm(("normalize_std",), {"gamma": 1.0, "lam": 1.0}, relative=False, tokens=True, critic=True),
}

LOSSES = {
    "vanilla": Algorithm((*_CLIP, "dual_clip")),
    "gspo": Algorithm(_CLIP),
    "geo_mean": Algorithm(_CLIP, responses=True),
    "cispo": Algorithm(_CLIP),
    "sapo": Algorithm(options={"tau_positive": 1.0, "tau_negative": 1.05}),
    "gpg": Algorithm(ratio=False),
    "dro": Algorithm(options={"beta": 0.1}, whole=True, penalty=True),
    "dppo_tv": Algorithm(_CLIP, {"max_ratio": 20.0}),
    "dppo_kl": Algorithm(_CLIP, {"max_ratio": 20.0}),
    "clip_cov": Algorithm(_CLIP, {"share": 0.0002, "least": 1.0, "most": 5.0}, whole=True, chooses=True),
    "kl_cov": Algorithm(options={"share": 0.0002, "coef": 1.0}, whole=True, chooses=True, penalty=True),
}
