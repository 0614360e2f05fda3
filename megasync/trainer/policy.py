"""The policy training step: groups of trajectories in, one or more optimizer steps, metrics out.

A step passes through five stages, over a table of its trajectories and tables of its tokens (`trainer.tables`):

    select    plans the minibatches from headers, and loads what this rank computes of them
    score     log-probs of the weights before the step and of the reference, where a later stage reads them
    estimate  the advantages that headers alone do not tell; a critic learns here
    update    an optimizer step for each minibatch
    record    responses with their scores, for `observe.rollouts`

`estimate` and `update` declare the columns that they read (`algorithms.choose`). What `select` loads and `score`
computes follows from that: a column that nobody reads costs nothing. Every rank plans the same from the headers of all
groups, without communication, and keeps the scores of what it computes, because training uses the same packing.

The loss of an optimizer step is a sum over tokens divided by the number of trained tokens of all its trajectories, or
by what `algorithm.aggregation` says, over all microbatches and data-parallel ranks. The number is never zero, because a
step without trained tokens is skipped.

Advantages are estimated of samples, whose trajectories all get that of their sample (`algorithms.advantages`).
With a critic, rewards of tokens or a KL penalty in the rewards they are known only where their trajectories are
computed, or only after the ranks have exchanged a few numbers for each trajectory.

Without a KL or entropy term, and in most losses, a trajectory with advantage zero has no gradient. It is then not
computed, but its tokens stay in the divisor, so the gradient is exactly the same. If no trajectory has a gradient, the
optimizer step is not taken. Per-token metrics are means over the computed tokens of the steps that were applied.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megasync.algorithms.advantages import WHITEN_EPS, Floats, Forks, TokenRewards
from megasync.algorithms.choose import (
    Column,
    Columns,
    chooser_of,
    estimate_columns,
    estimator_of,
    ignores_zeros,
    update_columns,
)
from megasync.algorithms.losses import AGES, KL_KINDS, StepTokens, policy_loss, random_keys
from megasync.base.files import atomic_write
from megasync.buffer.payload import LeasedGroup
from megasync.config.schema import AlgorithmConfig
from megasync.errors import MegasyncError
from megasync.observe import trace
from megasync.observe.metrics import percentiles
from megasync.trainer.batch import Batch, Sample
from megasync.trainer.critic import Critic
from megasync.trainer.flops import ADAPTER_PASSES, TRAINING_PASSES, ModelFlops, Work
from megasync.trainer.learner import LocalBatch, MegatronLearner
from megasync.trainer.offload import Offload
from megasync.trainer.optimizer import SkipBudget, named_norms
from megasync.trainer.recording import Recorder
from megasync.trainer.tables import (
    Loader,
    Minibatch,
    Step,
    TokenTable,
    TrajectoryTable,
    check_advantages,
    distribute,
    divisor_of,
    joined,
    read_columns,
    sample_advantages,
    trajectory_table,
)
from megasync.trajectory import ROUTES, Trajectory, sample_rewards

log = logging.getLogger(__name__)

# Cosine of the change that adapters make and of what merged weights have of it, below which a run warns: a fifth of the
# latter is then noise.
KEPT_COSINE = 0.98

# Sums over computed tokens that the loss reports; the metrics of the same names are their means.
PER_TOKEN = (
    "entropy",
    "kl",
    "approx_kl",
    "clip_fraction",
    "dual_clip_fraction",
    "is_weight_mean",
    "is_outside_fraction",
    "is_rejected_fraction",
    "logprob_diff",
)


class PolicyTrainer:
    """Turns groups into optimizer steps of an initialised learner.

    If the algorithm needs a reference, it is the learner's weights at construction, and those of later steps as
    `algorithm.reference_every` says.

    Args:
        dump_dir: batches with a non-finite loss or gradient are written into it.
        temperature: at which the trajectories were sampled, and are scored.
        longest: the number of tokens that a response may have.
        critic: learns in the same steps, on the same process groups.
        teachers: they have scored the trajectories.
        recorder: records responses of each step.
        peak_tflops: of a device; None if it is unknown.
        norms_every: every so many steps norms are measured by groups of layers; 0 for never.
    """

    def __init__(
        self,
        learner: MegatronLearner,
        algorithm: AlgorithmConfig,
        dump_dir: str | Path,
        temperature: float = 1.0,
        longest: int = 1,
        critic: Critic | None = None,
        teachers: bool = False,
        recorder: Recorder | None = None,
        peak_tflops: float | None = None,
        norms_every: int = 0,
    ) -> None:
        self._norms_every = norms_every
        self._peak_tflops = peak_tflops
        self._flops = ModelFlops.of(learner.layout)
        self._critic_flops = None if critic is None else ModelFlops.of(critic.learner.layout)
        self._recorder = recorder
        self._minibatches = learner.trainer_config.minibatches
        needs = estimate_columns(algorithm, critic is not None)
        self._needs = needs | update_columns(algorithm, self._minibatches, teachers)
        self._estimates_tokens = "token_rewards" in self._needs
        # Whether a trajectory matters also where its sample has no advantage, or where that is not known from headers.
        terms = algorithm.kl_coef or algorithm.entropy_coef or self._estimates_tokens or teachers
        self._keeps_zeros = bool(terms) or not ignores_zeros(algorithm)
        self._critic = critic
        self._offload = Offload(learner.memory, learner.device)
        self._longest = longest
        self._learner = learner
        self._device = learner.device.torch_device
        self._algorithm = algorithm
        self._dump_dir = Path(dump_dir)
        self._temperature = temperature
        self._warned = False
        self._budget = SkipBudget(learner.trainer_config.max_skipped_steps)
        if "reference" in self._needs:
            learner.keep_reference()

    def step(self, groups: Sequence[LeasedGroup], load: Loader, step: int, version: int) -> dict[str, float]:
        """Trains on the groups. A collective; returns the same metrics on every rank.

        ``load`` is called for the trajectories that this rank computes. ``step`` counts from 1 and determines the
        learning rate. Staleness is counted from the weight version ``version``. Raises NonFiniteError if more optimizer
        steps in a row than allowed had a non-finite loss or gradient, and TrainingError if a group has too few samples
        with a reward.
        """
        start = time.monotonic()
        current = self._select(groups, load, step, version)
        self._score(current)
        self._estimate(current)
        self._update(current)
        if self._recorder is not None:
            self._recorder.record(current)
        if (every := self._algorithm.reference_every) and step % every == 0:
            self._learner.keep_reference()
        current.metrics["train/seconds"] = seconds = time.monotonic() - start
        return current.metrics | self._speed(current, seconds)

    def _warms_up(self, step: int) -> bool:
        """Whether only the critic learns in a step."""
        return self._critic is not None and step <= self._critic.warmup_steps

    def _speed(self, step: Step, seconds: float) -> dict[str, float]:
        """Tokens and operations by second and device, over all passes of a step that took ``seconds``."""
        if not step.minibatches:
            return {}
        training = TRAINING_PASSES if self._learner.trained_layout is self._learner.layout else ADAPTER_PASSES
        training = 0 if self._warms_up(step.number) else training
        operations = 0.0
        for part in step.minibatches:
            operations += (part.scorings + training) * self._flops.forward(part.work)
            if self._critic_flops is not None:
                operations += (1 + TRAINING_PASSES) * self._critic_flops.forward(part.work)
        device_seconds = seconds * self._learner.topology.world
        teraflops = operations / device_seconds / 1e12
        speed = {
            "train/tokens_per_second_per_device": sum(part.work.tokens for part in step.minibatches) / device_seconds,
            "train/tflops_per_device": teraflops,
        }
        return speed if self._peak_tflops is None else {**speed, "train/mfu": teraflops / self._peak_tflops}

    # Select

    def _select(self, groups: Sequence[LeasedGroup], load: Loader, step: int, version: int) -> Step:
        trajectories, rewards = trajectory_table(groups, self._algorithm, self._estimates_tokens)
        metrics = _batch_metrics(groups, version)
        if self._recorder is not None:
            self._recorder.begin(groups)
        with trace.span("rank", "load", groups=len(groups)):
            parts = trajectories.split(len(groups), self._minibatches)
            minibatches = [self._minibatch(groups, part, load, version) for part in parts]
        return Step(step, version, groups, load, trajectories, rewards, minibatches, metrics)

    def _minibatch(
        self, groups: Sequence[LeasedGroup], part: TrajectoryTable, load: Loader, version: int
    ) -> Minibatch | None:
        """Plans a minibatch and loads what this rank computes of it; None if no trajectory has a gradient.

        A trajectory without a trained token never has one, so the loss is never divided by zero.
        """
        active = part[np.flatnonzero((part.trained > 0) & (self._keeps_zeros | (part.advantages != 0.0)))]
        if not len(active):
            return None
        packing = self._learner.plan(active.lengths)
        microbatches = self._learner.own_microbatches(packing)
        rows = sorted({row for microbatch in microbatches for row in microbatch.sequences})
        loaded = active.load(groups, rows, load)
        samples = {row: _sample(loaded[row], int(active.lengths.response_inputs[row])) for row in rows}
        tables: list[TokenTable] = []
        if self._learner.is_last_stage:
            read = {row: read_columns(loaded[row], samples[row].scored, version, self._needs) for row in rows}
            tables = [
                TokenTable(each.sequences, each.counted, [read[row] for row in each.sequences], self._device)
                for each in microbatches
            ]
        recorder = self._recorder
        return Minibatch(
            active,
            divisor_of(part, self._algorithm, self._longest),
            LocalBatch(microbatches, samples, packing.counted_tokens),
            Work.of(packing, active.lengths, int(active.trained.sum())),
            tables,
            {row: loaded[row] for row in rows if recorder is not None and recorder.takes(int(active.groups[row]))},
        )

    # Score

    def _score(self, step: Step) -> None:
        """Scores all minibatches before any of them is trained, as far as later stages read the scores."""
        for minibatch in step.minibatches:
            if "norms" in self._needs:
                old, norms = self._learner.score_with_norms(minibatch.batch, temperature=self._temperature)
                minibatch.add("old", old)
                minibatch.add("norms", norms)
                minibatch.scorings += 1
            elif "old" in self._needs:
                minibatch.add("old", self._score_policy(minibatch))
        if "reference" in self._needs:
            for minibatch in step.minibatches:
                minibatch.add("reference", self._score_policy(minibatch, reference=True))

    def _score_policy(self, minibatch: Minibatch, reference: bool = False) -> list[torch.Tensor]:
        minibatch.scorings += 1
        return self._learner.score(minibatch.batch, temperature=self._temperature, reference=reference)

    # Estimate

    def _estimate(self, step: Step) -> None:
        """Estimates advantages again from what is known of the step now, and those of tokens. A collective."""
        algorithm, rewards = self._algorithm, step.rewards
        if "penalties" in self._needs:
            for table in step.tables:
                kl = KL_KINDS[algorithm.kl_kind](table.columns["old"], table.columns["reference"])
                table.columns["penalties"] = algorithm.kl_coef * kl
            penalties = self._sample_sums(step, lambda columns: columns["penalties"])
            step.metrics["train/reward_penalty"] = float(penalties.mean())
            rewards = replace(rewards, rewards=rewards.rewards - penalties)
        if "log_ratios" in self._needs:
            log_ratios = self._sample_sums(step, lambda columns: columns["old"] - columns["reference"])
            rewards = replace(rewards, log_ratios=log_ratios)
        if self._estimates_tokens:
            self._estimate_tokens(step)
        elif rewards is not step.rewards:
            advantages = sample_advantages(rewards, algorithm)
            for minibatch in step.minibatches:
                rows = minibatch.trajectories
                minibatch.trajectories = replace(rows, advantages=advantages[rows.samples])

    def _sample_sums(self, step: Step, values: Callable[[Columns], torch.Tensor]) -> Floats:
        """The sums of values over the tokens of each sample of the step, the same on all ranks. A collective."""
        sums = torch.zeros(len(step.rewards.rewards), dtype=torch.float64, device=self._device)
        for minibatch, table in step.counted():
            samples = torch.from_numpy(table.repeated(minibatch.trajectories.samples)).to(self._device)
            sums.index_add_(0, samples, values(table.columns).double())
        return self._summed(sums.cpu().numpy())

    def _summed(self, values: Floats) -> Floats:
        """The sums over all ranks of what each knows of its own responses. A collective."""
        coords = self._learner.coords
        # Tensor and context peers have the same.
        local = values if not (coords.tp or coords.cp) else np.zeros_like(values)
        sums = torch.from_numpy(local).to(self._device)
        dist.all_reduce(sums)
        return sums.cpu().numpy()

    def _estimate_tokens(self, step: Step) -> None:
        """Estimates the advantages of tokens; a critic gives their values, and learns their returns."""
        if self._critic is None:
            self._token_advantages(step)
        elif step.minibatches:
            with self._critic.on_device(self._offload):
                for minibatch in step.minibatches:
                    minibatch.add("values", self._critic.learner.values(minibatch.batch))
                self._token_advantages(step)
                for table in step.tables:
                    table.columns["returns"] = table.columns["token_advantages"] + table.columns["values"]
                if self._algorithm.normalize_std:
                    self._whiten(step.tables)
                step.metrics |= self._critic.learn(step.minibatches, step.number)
            for table in step.tables:
                del table.columns["values"], table.columns["returns"]

    def _token_advantages(self, step: Step) -> None:
        """Estimates the advantages of the targets of all minibatches. A collective."""
        pairs = list(step.counted())
        tables, trajectories = [table for _, table in pairs], step.trajectories
        numbers = joined((part.trajectories.numbers[table.rows] for part, table in pairs), np.int64)
        computed = np.flatnonzero(trajectories.trained)

        def column(name: Column) -> Floats:
            return joined(_numbers(table.columns[name]) for table in tables)

        token_rewards = column("token_rewards")
        rewards = TokenRewards.of(
            step.rewards,
            Forks(
                trajectories.samples[computed],
                trajectories.groups[computed],
                trajectories.trained[computed],
                np.searchsorted(computed, numbers),
            ),
            int(trajectories.groups[-1]) + 1,
            self._summed,
            starts=np.cumsum([0, *joined((table.counts for table in tables), np.int64)]),
            token_rewards=token_rewards,
            rewarded=column("rewarded").astype(np.bool_),
            values=np.zeros(len(token_rewards)) if self._critic is None else column("values"),
            penalties=column("penalties") if "penalties" in self._needs else None,
            squared_norms=column("norms") if "norms" in self._needs else None,
        )
        advantages = np.asarray(estimator_of(self._algorithm)(rewards), dtype=np.float64)
        # Values that are not finite make the losses so, and every rank then skips the step.
        check_advantages(self._algorithm, advantages, len(rewards.rewards), "token")
        distribute(step.tables, "token_advantages", torch.from_numpy(advantages.astype(np.float32)).to(self._device))

    def _whiten(self, tables: Sequence[TokenTable]) -> None:
        """Shifts and scales advantages to mean 0 and variance 1 over the trained tokens of the step, on all ranks."""
        if not tables:
            return  # Only the last stage has any.
        counted = [table.columns["token_advantages"] for table in tables if table.counted]
        values = torch.cat([torch.zeros(0, device=self._device), *counted]).double()
        first = torch.stack([torch.full_like(values.sum(), len(values)), values.sum()])
        dist.all_reduce(first, group=self._learner.data_group)
        count, mean = first[0], first[1] / first[0]
        squares = (values - mean).square().sum()
        dist.all_reduce(squares, group=self._learner.data_group)
        scale = (squares / (count - 1).clamp(min=1) + WHITEN_EPS).rsqrt()
        for table in tables:
            table.columns["token_advantages"] = ((table.columns["token_advantages"] - mean) * scale).float()

    # Update

    def _update(self, step: Step) -> None:
        """Takes an optimizer step on each minibatch with a gradient, unless only the critic learns."""
        if step.minibatches and self._warms_up(step.number):
            step.metrics["train/skipped"] = 0.0
            return
        reports = []
        for index, minibatch in enumerate(step.parts):
            if minibatch is not None:
                self._choose(minibatch, step.number, moved=bool(reports))
                report = self._optimizer_step(minibatch, step)
                self._count(step, minibatch, f"step-{step.number:08d}-{index}", report)
                reports.append(report)
        # For the weight sync, which reads them where they are.
        if (kept := self._learner.gather_weights()) is not None:
            step.metrics["train/merged_cosine"] = kept
            self._warn_of_rounding(kept)
        step.metrics |= _summary(reports) | {"train/without_gradient": float(len(step.parts) - len(reports))}

    def _warn_of_rounding(self, kept: float) -> None:
        """Warns once, on the first rank, if servers get little of what the adapters have learned."""
        if kept >= KEPT_COSINE or self._warned or self._learner.rank:
            return
        self._warned = True
        log.warning(
            "Merged weights in %s differ from what the adapters have learned (cosine of the changes %.2f, "
            "train/merged_cosine): a change this small is lost in rounding, so servers sample another policy. It grows "
            "with training; set sync.transport=adapters, which merges nothing, or model.dtype=float32",
            self._learner.model_config.dtype,
            kept,
        )

    def _choose(self, minibatch: Minibatch, step: int, moved: bool) -> None:
        """Chooses the tokens that the loss treats apart, among those of all ranks. A collective.

        ``moved``: the weights have changed since the scores before the step, so the minibatch is scored again.
        """
        chooser = chooser_of(self._algorithm)
        if chooser is None:
            return
        if moved or "old" not in self._needs:
            scores = self._score_policy(minibatch)
        else:
            scores = [table.columns["old"] for table in minibatch.tables]
        pairs = [pair for pair in zip(minibatch.tables, scores, strict=True) if pair[0].counted]
        tables = [table for table, _ in pairs]
        olds = [table.columns.get("old", scored) for table, scored in pairs]
        denominators = olds
        if self._algorithm.ratio == "behaviour":
            denominators = [table.columns["behaviour"] for table in tables]
        advantages = [self._advantages(minibatch, *pair)["advantages"] for pair in zip(tables, olds, strict=True)]
        logprobs = joined(_numbers(scored) for _, scored in pairs)
        numbers = joined((table.repeated(minibatch.trajectories.numbers) for table in tables), np.int64)
        places = joined((np.arange(count) for table in tables for count in table.counts), np.int64)
        keys = random_keys(step, numbers, places)
        tokens = StepTokens(
            logprobs, joined(map(_numbers, denominators)), joined(map(_numbers, advantages)), keys, self._summed
        )
        distribute(minibatch.tables, "chosen", torch.from_numpy(chooser(tokens)).to(self._device))

    def _advantages(self, minibatch: Minibatch, table: TokenTable, old: torch.Tensor) -> Columns:
        """The advantages of targets, and with teachers their gaps to one, NaN where they have none.

        ``old`` are the log-probs before the step.
        """
        if (advantages := table.columns.get("token_advantages")) is None:
            each = table.repeated(minibatch.trajectories.advantages)
            advantages = torch.from_numpy(each.astype(np.float32)).to(self._device)
        if "teacher" not in self._needs:
            return {"advantages": advantages}
        gap = table.columns["teacher"] - old
        teacher = torch.where(gap.isnan(), 0.0, gap)
        mixed = self._algorithm.reward_coef * advantages + self._algorithm.teacher_coef * teacher
        return {"advantages": mixed, "teacher_gap": gap}

    def _optimizer_step(self, minibatch: Minibatch, step: Step) -> dict[str, float]:
        """One optimizer step; reports sums over computed tokens, and the optimizer's update."""

        def loss(
            batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            table = minibatch.tables[batch.index]
            old = table.columns.get("old", logprobs.detach())
            advantages = self._advantages(minibatch, table, old)
            columns: Columns = {
                **table.columns,
                **advantages,
                "logprobs": logprobs,
                "entropy": entropy if self._algorithm.entropy_coef else entropy.detach(),
                "old": old,
                "segments": batch.segments,
                "mask": torch.full_like(logprobs, float(batch.counted)),
            }
            if self._algorithm.aggregation == "sequence":
                each = 1.0 / table.repeated(minibatch.trajectories.sequences)
                columns["weights"] = torch.from_numpy(each.astype(np.float32)).to(self._device)
            if not minibatch.recorded.keys().isdisjoint(table.rows.tolist()):
                table.columns |= {"old": old, "advantages": columns["advantages"]}
            total, sums = policy_loss(self._algorithm, columns)
            return total / minibatch.divisor, sums

        sums = self._learner.forward_backward(minibatch.batch, loss, self._temperature)
        measured = bool(self._norms_every) and step.number % self._norms_every == 0
        # Its learning rate begins its course when it begins to learn.
        policy_step = step.number if self._critic is None else step.number - self._critic.warmup_steps
        update = self._learner.update(policy_step, math.isfinite(sums["loss"]), measured)
        norms = {} if update.squares is None else named_norms(update.squares, self._learner.layout.sizes.layers)
        return {**sums, **norms, "applied": float(update.applied), "grad_norm": update.grad_norm, "lr": update.lr}

    # Non-finite steps

    def _count(self, step: Step, minibatch: Minibatch, name: str, report: dict[str, float]) -> None:
        """Counts an optimizer step; the first rank writes the batch of a skipped one."""
        applied = bool(report["applied"])
        if not applied and self._learner.rank == 0:
            try:
                self._dump(step, minibatch.trajectories, name, report)
            except (OSError, MegasyncError) as error:
                # Raising here would leave the other ranks waiting.
                log.error("Could not write the batch of %s: %s", name, error)
        values = f"loss {report['loss']} and gradient norm {report['grad_norm']}"
        self._budget.count(applied, f"{name} with {values}; the batches are in {self._dump_dir}")

    def _dump(self, step: Step, trajectories: TrajectoryTable, name: str, report: dict[str, float]) -> None:
        """Writes all trajectories of a minibatch, also those of other ranks."""
        loaded = trajectories.load(step.groups, range(len(trajectories)), step.load)
        batch = [
            {"uid": step.groups[group].uid, "advantage": advantage, "trajectory": loaded[row].plain()}
            for row, (group, advantage) in enumerate(
                zip(trajectories.groups.tolist(), trajectories.advantages.tolist(), strict=True)
            )
        ]
        reported = {key: report[key] for key in ("loss", "grad_norm")}
        record = {"name": name, "step": step.number, "version": step.version, **reported, "batch": batch}
        # JSON has no non-finite numbers; they become strings such as "nan".
        record = json.loads(json.dumps(record), parse_constant=lambda name: str(float(name)))
        self._dump_dir.mkdir(parents=True, exist_ok=True)
        atomic_write(self._dump_dir / f"{name}.json", json.dumps(record, allow_nan=False))


def _batch_metrics(groups: Sequence[LeasedGroup], version: int) -> dict[str, float]:
    """Counts and staleness over all trajectories with a reward, and mean and deviation of the rewards of their samples.

    Staleness is the number of versions between the current weights and the oldest that sampled a trained token; that
    of tokens is of each trained token by itself.
    """
    trajectories = [t for group in groups for t in group.header.trajectories if t.reward is not None]
    by_group = [sample_rewards(group.header.trajectories) for group in groups]
    rewards = [reward for of_group in by_group for reward in of_group]
    ages = [version - oldest for t in trajectories if (oldest := t.oldest_version) is not None]
    metrics = {
        "train/sequences": float(len(trajectories)),
        "train/tokens": float(sum(t.trained_tokens for t in trajectories)),
        "train/reward": sum(rewards) / max(1, len(rewards)),
        "train/reward_std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0,
        "train/uniform_groups": sum(len(set(of_group)) < 2 for of_group in by_group) / max(1, len(by_group)),
    }
    # To be compared with those of all generated responses.
    if lengths := [t.response_tokens for t in trajectories]:
        name = "train/response_length"
        metrics |= {name: sum(lengths) / len(lengths), **percentiles(name, lengths)}
    by_age = Counter[int]()
    for t in trajectories:
        for sampled, tokens in t.trained:
            by_age[version - sampled] += tokens
    if tokens := by_age.total():
        metrics["train/token_staleness"] = sum(age * count for age, count in by_age.items()) / tokens
        for age in range(AGES):
            # The last one includes all older tokens, as that of `train/server_kl` does.
            count = by_age[age] if age < AGES - 1 else sum(n for other, n in by_age.items() if other >= age)
            if count:
                metrics[f"train/token_staleness@{age}"] = count / tokens
    if ages:
        metrics |= {"train/staleness_mean": sum(ages) / len(ages), "train/staleness_max": float(max(ages))}
    return metrics


def _sample(trajectory: Trajectory, response_inputs: int) -> Sample:
    scored = np.flatnonzero(trajectory.loss_mask.expand())
    support = trajectory.support
    return Sample(
        trajectory.prompt_ids,
        trajectory.response_ids,
        scored,
        response_inputs,
        trajectory.arrays.get(ROUTES),
        None if support is None else support.at(scored),
    )


def _numbers(values: torch.Tensor) -> Floats:
    return values.double().cpu().numpy()


def _summary(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of all minibatches: means over the optimizer steps that were applied, and over their computed tokens."""
    applied = [report for report in reports if report["applied"]]
    metrics = {"train/skipped": float(len(reports) - len(applied))}
    if not applied:
        return metrics

    def total(name: str) -> float:
        return sum(report[name] for report in applied)

    tokens = total("tokens")
    metrics |= {f"train/{name}": total(name) / len(applied) for name in ("loss", "grad_norm")}
    metrics |= {f"train/{name}": total(name) / tokens for name in PER_TOKEN if name in applied[0]}
    if "teacher_tokens" in applied[0] and (tokens_of_teachers := total("teacher_tokens")):
        metrics["train/teacher_kl"] = total("teacher_kl") / tokens_of_teachers
    for age in range(AGES):
        if of_age := total(f"tokens@{age}"):
            metrics[f"train/server_kl@{age}"] = total(f"server_kl@{age}") / of_age
    # How many tokens of equal weight would have the same variance, as a share (Kish 1965).
    squares = total("is_weight_square")
    metrics["train/is_effective_share"] = total("is_weight_mean") ** 2 / (tokens * squares) if squares else 0.0
    # Of the last optimizer step.
    metrics |= {name: value for name, value in applied[-1].items() if name.startswith("norms/")}
    return {**metrics, "train/computed_tokens": tokens, "train/lr": applied[-1]["lr"]}
