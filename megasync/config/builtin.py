"""Names that a configuration may use for what ships with this package, and where each is defined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

REWARDS = {
    "math": "megasync.rewards.math_reward:math_reward",
    "code": "megasync.rewards.code_reward:CodeReward",
}

ENVIRONMENTS = {
    "reasoning_gym": "megasync.environments.reasoning_gym_task:ReasoningGymTask",
    "gymnasium": "megasync.environments.gymnasium_text:GymnasiumText",
}


CURRICULA = {"by_success": "megasync.data.curriculum:by_success"}


@dataclass(frozen=True)
class Algorithm:
    """An advantage estimator or a policy loss: its function, and what it takes beside the data.

    ``keys`` are keys of the section `algorithm`, ``options`` its own options with their defaults. ``relative``: an
    estimator compares the samples of a group, so one of them is not enough. ``scores``: it compares the scores of each
    reward function by itself. ``tokens``: it takes the rewards of tokens and estimates their advantages. ``critic``: it
    takes the values of one, ``reference``: the log-ratios to the reference policy, ``baseline``: the rewards of greedy
    responses, ``norms``: the squared norms of gradients by logits.

    ``whole``: a loss has a gradient, or an effect on other tokens, also where the advantage is 0. ``chooses``: the
    function that says which tokens of a whole minibatch it treats apart; keys and options are those of both.
    ``responses``: all tokens of a response get the same gradient, so they must have the same advantage and weight.
    ``ratio``: it takes the ratio of policies. ``penalty``: it differs from the plain policy gradient by a penalty on
    that ratio alone.
    """

    function: str
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
    chooses: str = ""
    responses: bool = False
    ratio: bool = True
    penalty: bool = False


_A, _L = "megasync.algorithms.advantages", "megasync.algorithms.losses"
_CLIP = ("clip_low", "clip_high")

ADVANTAGES = {
    "grpo": Algorithm(f"{_A}.grpo:grpo", ("normalize_std",)),
    "grpo_passk": Algorithm(f"{_A}.grpo_passk:grpo_passk", ("normalize_std",)),
    "gdpo": Algorithm(f"{_A}.gdpo:gdpo", ("normalize_std",), scores=True),
    "rloo": Algorithm(f"{_A}.rloo:rloo"),
    "opo": Algorithm(f"{_A}.opo:opo"),
    "gpg": Algorithm(f"{_A}.gpg:gpg"),
    "reinforce_plus_plus": Algorithm(f"{_A}.reinforce_plus_plus:reinforce_plus_plus", relative=False),
    "reinforce_plus_plus_baseline": Algorithm(f"{_A}.reinforce_plus_plus:reinforce_plus_plus_baseline"),
    "remax": Algorithm(f"{_A}.remax:remax", relative=False, baseline=True),
    "grpo_process": Algorithm(f"{_A}.process:grpo_process", ("normalize_std",), tokens=True),
    "optimal_token_baseline": Algorithm(f"{_A}.optimal_baseline:optimal_token_baseline", tokens=True, norms=True),
    "dpo": Algorithm(f"{_A}.dpo:dpo", options={"beta": 0.1}, reference=True),
    "gae": Algorithm(
        f"{_A}.gae:gae", ("normalize_std",), {"gamma": 1.0, "lam": 1.0}, relative=False, tokens=True, critic=True
    ),
}

LOSSES = {
    "vanilla": Algorithm(f"{_L}.vanilla:vanilla", (*_CLIP, "dual_clip")),
    "gspo": Algorithm(f"{_L}.gspo:gspo", _CLIP),
    "geo_mean": Algorithm(f"{_L}.geo_mean:geo_mean", _CLIP, responses=True),
    "cispo": Algorithm(f"{_L}.cispo:cispo", _CLIP),
    "sapo": Algorithm(f"{_L}.sapo:sapo", options={"tau_positive": 1.0, "tau_negative": 1.05}),
    "gpg": Algorithm(f"{_L}.gpg:gpg", ratio=False),
    "dro": Algorithm(f"{_L}.dro:dro", options={"beta": 0.1}, whole=True, penalty=True),
    "dppo_tv": Algorithm(f"{_L}.dppo:dppo_tv", _CLIP, {"max_ratio": 20.0}),
    "dppo_kl": Algorithm(f"{_L}.dppo:dppo_kl", _CLIP, {"max_ratio": 20.0}),
    "clip_cov": Algorithm(
        f"{_L}.covariance:clip_cov",
        _CLIP,
        {"share": 0.0002, "least": 1.0, "most": 5.0},
        whole=True,
        chooses=f"{_L}.covariance:clip_cov_tokens",
    ),
    "kl_cov": Algorithm(
        f"{_L}.covariance:kl_cov",
        options={"share": 0.0002, "coef": 1.0},
        whole=True,
        chooses=f"{_L}.covariance:kl_cov_tokens",
        penalty=True,
    ),
}
