"""Checks of the algorithm, the critic and the optimizers, for `check.check_config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megasync.algorithms.choose import takes_tokens
from megasync.config.builtin import ADVANTAGES, LOSSES, Algorithm
from megasync.config.limits import as_typed, refuse_unused
from megasync.config.schema import AlgorithmConfig, Config, OptimizerConfig
from megasync.errors import ConfigError
from megasync.layout.families.value_head import BIAS, WEIGHT
from megasync.layout.layout import Layout
from megasync.layout.model_files import find_hf_config, read_hf_config
from megasync.preflight.check_weights import check_weights


def check_algorithm(config: Config) -> None:
    """Raises ConfigError for keys of `algorithm` that contradict each other."""
    algorithm, samples = config.algorithm, config.schedule.samples_per_group
    for key, builtin in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        _check_options(algorithm, key, builtin)
    estimator = ADVANTAGES.get(algorithm.advantage)
    if not config.teachers:
        reason = "without teachers; name one in teachers.<name>.path"
        refuse_unused(algorithm, "algorithm", ("reward_coef", "teacher_coef"), reason)
    if not algorithm.reward_coef and config.critic.enabled:
        raise ConfigError(
            "algorithm.reward_coef=0 trains on teachers alone, but critic.enabled=true estimates advantages of "
            "rewards; change one of them"
        )
    if not algorithm.reward_coef and config.rollout.groups.drop_uniform:
        raise ConfigError(
            "rollout.groups.drop_uniform=true drops prompts by their rewards, but algorithm.reward_coef=0 trains on "
            "teachers alone; set drop_uniform=false"
        )
    if estimator is not None and estimator.relative and algorithm.reward_coef and samples < 2:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} compares the samples of one prompt, but "
            f"schedule.samples_per_group={samples}; set it to at least 2"
        )
    if algorithm.correction == "none":
        bounds = ("correction_cap", "correction_floor", "correction_outside")
        refuse_unused(algorithm, "algorithm", bounds, "with algorithm.correction=none; choose token or sequence")
    if algorithm.kl_in == "reward" and not algorithm.kl_coef:
        raise ConfigError("algorithm.kl_in=reward subtracts a KL penalty, but algorithm.kl_coef=0; set it above 0")
    if algorithm.kl_in == "reward" and algorithm.advantage == "dpo":
        raise ConfigError(
            "algorithm.kl_in=reward changes rewards, of which algorithm.advantage=dpo uses the order alone; set "
            "kl_in=loss, or kl_coef=0: its options.beta is the penalty"
        )
    if algorithm.kl_in == "reward" and algorithm.advantage == "gdpo":
        raise ConfigError(
            "algorithm.kl_in=reward subtracts the KL penalty from one reward, but algorithm.advantage=gdpo normalises "
            "each reward function's alone; set kl_in=loss"
        )
    if algorithm.kl_in == "reward" and algorithm.advantage == "gpg":
        raise ConfigError(
            "algorithm.kl_in=reward gives the samples of every group different rewards, but algorithm.advantage=gpg "
            "scales by the share of groups whose rewards differ; set kl_in=loss"
        )
    if config.rollout.groups.overlong == "punish" and algorithm.reward_coef and algorithm.advantage == "gdpo":
        raise ConfigError(
            "rollout.groups.overlong=punish subtracts a penalty from the sum of the rewards, but "
            "algorithm.advantage=gdpo normalises the scores of each reward function by itself; set overlong=keep or "
            "mask, and score the length in one of rollout.rewards"
        )
    if algorithm.aggregation == "token":
        reason = "with algorithm.aggregation=token, in which each token weighs the same; choose sequence or constant"
        refuse_unused(algorithm, "algorithm", ("sample_weight",), reason)
    every, saved = algorithm.reference_every, config.checkpoint.every_steps
    if every and not algorithm.kl_coef and not (estimator is not None and estimator.reference):
        raise ConfigError(
            f"algorithm.reference_every={every} renews the reference of the KL penalty, but algorithm.kl_coef=0; set "
            f"it above 0, or reference_every=0"
        )
    if every and (not saved or every % saved):
        raise ConfigError(
            f"algorithm.reference_every={every} takes the reference from checkpoints, but checkpoint.every_steps="
            f"{saved} saves none after these steps; make reference_every a multiple of every_steps"
        )
    if algorithm.rejection == "none":
        reason = "with algorithm.rejection=none; choose sequence, product or token"
        refuse_unused(algorithm, "algorithm", ("rejection_floor", "rejection_cap"), reason)
    elif not algorithm.rejection_floor and algorithm.rejection_cap is None:
        raise ConfigError(
            f"algorithm.rejection={algorithm.rejection} rejects nothing without bounds; set algorithm.rejection_floor "
            f"or algorithm.rejection_cap"
        )
    if algorithm.ratio == "behaviour" and algorithm.correction != "none":
        raise ConfigError(
            f"algorithm.ratio=behaviour already corrects for stale samples, and algorithm.correction="
            f"{algorithm.correction} would correct twice; set algorithm.correction=none or algorithm.ratio=trainer"
        )


def check_objective(config: Config) -> None:
    """Raises ConfigError for a pair of estimator, loss, KL term, correction and aggregation that trains on something
    else than docs/algorithms.md says of either. tests/algorithms/test_objectives.py proves the pairs that are left.
    """
    for refused, why in _objections(config):
        if refused:
            raise ConfigError(why)


def _objections(config: Config) -> Iterator[tuple[bool, str]]:
    """Whether each pair is refused, and why."""
    algorithm, minibatches, schedule = config.algorithm, config.trainer.minibatches, config.schedule
    name = algorithm.loss
    loss = LOSSES.get(name, Algorithm(name))
    penalised, in_reward = bool(algorithm.kl_coef), algorithm.kl_in == "reward"
    of_response = f"algorithm.loss={name} gives all tokens of a response the same gradient"
    # KL terms
    yield (
        penalised and not in_reward and algorithm.kl_kind == "k1",
        "algorithm.kl_kind=k1 with algorithm.kl_in=loss has an expected gradient of zero, so it adds noise and no "
        "penalty; set kl_kind=k2 or k3, or kl_in=reward",
    )
    yield (
        penalised and in_reward and algorithm.kl_kind != "k1",
        f"algorithm.kl_kind={algorithm.kl_kind} with algorithm.kl_in=reward has next to no gradient near the "
        f"reference, because {algorithm.kl_kind} is zero there together with its slope; set kl_kind=k1, or kl_in=loss",
    )
    yield (
        penalised and in_reward and not algorithm.reward_coef,
        f"algorithm.kl_in=reward subtracts a penalty from rewards, which algorithm.reward_coef=0 does not train on, so "
        f"algorithm.kl_coef={algorithm.kl_coef} would have no effect; set kl_in=loss",
    )
    yield (
        penalised and in_reward and algorithm.advantage == "grpo_passk",
        "algorithm.kl_in=reward changes which response is the best of its group, the only one that "
        "algorithm.advantage=grpo_passk trains, and would pull that one away from the reference; set kl_in=loss",
    )
    # Losses of whole responses
    estimates_tokens = bool(algorithm.reward_coef) and takes_tokens(algorithm, config.critic.enabled)
    yield (
        loss.responses and estimates_tokens,
        f"{of_response}, but algorithm.advantage={algorithm.advantage} estimates one for each token; choose an "
        f"estimator of responses, such as rloo, or a loss of tokens, such as vanilla",
    )
    yield (
        loss.responses and bool(config.teachers),
        f"{of_response}, but teachers say something else of each token; choose a loss of tokens, such as vanilla",
    )
    yield (
        loss.responses and algorithm.correction == "token",
        f"{of_response}, but algorithm.correction=token weighs each token by its own ratio; set correction=sequence, "
        f"product or none",
    )
    # Losses that do not differ from the plain policy gradient
    yield (
        loss.penalty and minibatches == 1 and algorithm.ratio == "trainer",
        f"algorithm.loss={name} penalises what a batch's earlier optimizer steps have changed, but with "
        f"trainer.minibatches=1 there are none, so it would be loss=gpg; set minibatches to at least 2",
    )
    yield (
        loss.penalty and minibatches == 1 and schedule.max_staleness == 0 and schedule.weight_sync_steps == 1,
        f"algorithm.loss={name} penalises what has changed since a token was sampled, but with trainer.minibatches=1 "
        f"and schedule.max_staleness=0 nothing has, so it would be loss=gpg; set minibatches to at least 2",
    )
    yield (
        not loss.ratio and algorithm.ratio == "behaviour",
        f"algorithm.ratio=behaviour has no effect on algorithm.loss={name}, which takes no ratio; set ratio=trainer, "
        f"with a correction for stale samples",
    )
    # Preferences: both responses of a pair must weigh the same
    if algorithm.advantage == "dpo" and algorithm.reward_coef:
        pair = "algorithm.advantage=dpo weighs both responses of a pair alike, but "
        for refused, but in (
            (
                algorithm.aggregation == "sequence",
                "algorithm.aggregation=sequence divides each by its length; set aggregation=token or constant",
            ),
            (
                algorithm.correction != "none",
                f"algorithm.correction={algorithm.correction} weighs each by ratios of its own; set correction=none",
            ),
            (
                algorithm.ratio == "behaviour",
                "algorithm.ratio=behaviour weighs each by ratios of its own; set ratio=trainer",
            ),
            (
                algorithm.rejection != "none",
                f"algorithm.rejection={algorithm.rejection} may leave out one of them; set rejection=none",
            ),
            (
                bool(loss.chooses) and not loss.penalty,
                f"algorithm.loss={name} leaves out tokens of one of them; choose another loss, such as gpg",
            ),
            (
                schedule.stale == "mask",
                "schedule.stale=mask leaves out stale tokens of one of them; set stale=regenerate or drop",
            ),
        ):
            yield refused, f"{pair}{but}"


def _check_options(algorithm: AlgorithmConfig, key: str, builtin: Mapping[str, Algorithm]) -> None:
    """Refuses options that the function does not take, and keys that only others of its kind read."""
    name, options = getattr(algorithm, key), getattr(algorithm, f"{key}_options")
    if name not in builtin:
        # As the ranks load it: its signature is checked too. Imports torch, which a user's own function does as well.
        from megasync.algorithms.choose import estimator_of, loss_of

        (loss_of if builtin is LOSSES else estimator_of)(algorithm)
        return
    item = builtin[name]
    for option, value in options.items():
        given = f"algorithm.{key}_options.{option}={as_typed(value)}"
        if option not in item.options:
            known = f"its options are {', '.join(item.options)}" if item.options else "it has none"
            raise ConfigError(f"{given}: algorithm.{key}={name} has no such option; {known}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"{given} must be a number above 0")
        if item.critic and value > 1:
            raise ConfigError(f"{given} must be at most 1")
    unused = {other for each in builtin.values() for other in each.keys} - set(item.keys)
    refuse_unused(algorithm, "algorithm", sorted(unused), f"with algorithm.{key}={name}; choose another {key}")


def check_critic(config: Config) -> None:
    """Raises ConfigError if estimator and critic do not fit, or for keys that have no effect."""
    critic, name = config.critic, config.algorithm.advantage
    estimator = ADVANTAGES.get(name)
    if not critic.enabled:
        if estimator is not None and estimator.critic:
            raise ConfigError(
                f"algorithm.advantage={name} needs the values of a critic, but critic.enabled=false; set it to true"
            )
        keys = ("path", "warmup_steps", "clip", "offload")
        refuse_unused(critic, "critic", keys, "with critic.enabled=false; set enabled=true")
        return
    if estimator is not None and not estimator.critic:
        raise ConfigError(
            f"critic.enabled=true trains a critic, but algorithm.advantage={name} does not use its values; set "
            f"algorithm.advantage=gae or critic.enabled=false"
        )
    if critic.warmup_steps >= config.schedule.total_steps:
        raise ConfigError(
            f"critic.warmup_steps={critic.warmup_steps} leaves no step of schedule.total_steps="
            f"{config.schedule.total_steps} to the policy; lower it"
        )


def check_critic_model(config: Config, policy: Layout) -> None:
    """Raises ConfigError if the critic starts from a folder of another architecture than the policy's."""
    if (path := config.critic.path) is None:
        return
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"critic.path={path!r} has no config.json or no *.safetensors files; give a Hugging Face folder, or null"
        )
    values = read_hf_config(find_hf_config(replace(config.model, path=path)))
    layout = Layout(values, policy.topology, policy.spec, value_head=True)
    if replace(layout.sizes, tied=policy.sizes.tied) != policy.sizes:
        raise ConfigError(
            f"critic.path={path!r} has other sizes than model.path={config.model.path!r}: policy and critic compute "
            f"the same microbatches, so give a folder of the same architecture, or null"
        )
    try:
        check_weights(folder, layout, absent=(WEIGHT, BIAS))
    except ConfigError as error:
        raise ConfigError(f"critic.path: {error}") from None


def check_optimizer(config: Config) -> None:
    """Raises ConfigError for an optimizer, of policy or critic, that does not fit `schedule.total_steps`."""
    total, first = config.schedule.total_steps, config.critic.warmup_steps
    less = f" less critic.warmup_steps={first}, in which the policy does not learn" if first else ""
    _check_adam("trainer.optimizer", config.trainer.optimizer, total - first, f"schedule.total_steps={total}{less}")
    if config.critic.enabled:
        _check_adam("critic.optimizer", config.critic.optimizer, total, f"schedule.total_steps={total}")


def _check_adam(key: str, optimizer: OptimizerConfig, steps: int, source: str) -> None:
    """``source`` says where the number of ``steps`` comes from."""
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ConfigError(f"{key}.betas={list(optimizer.betas)} must be two numbers, each at least 0 and below 1")
    if optimizer.warmup_steps > steps:
        raise ConfigError(f"{key}.warmup_steps={optimizer.warmup_steps} exceeds {source}; lower it")
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(f"{key}.min_lr={optimizer.min_lr} exceeds {key}.lr={optimizer.lr}; lower it")
    if optimizer.min_lr > 0 and optimizer.decay == "constant":
        raise ConfigError(
            f"{key}.min_lr={optimizer.min_lr} is never reached with {key}.decay=constant; "
            f"choose decay=linear or cosine, or set min_lr=0"
        )
