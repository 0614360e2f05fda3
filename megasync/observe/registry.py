"""Every metric of a run: its name, unit and meaning.

`python -m megasync.observe.registry` writes them to docs/metrics.md. Tests hold the names in the source and those that
real runs log against it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megasync.base.files import atomic_write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
# A part of a name that the configuration or a user's function chooses; it matches any text without a slash, or, with
# three dots, with slashes too.
_PART = re.compile(r"<([a-z ]+)(\.\.\.)?>")


@dataclass(frozen=True, slots=True)
class Metric:
    """`counts` are since a start and only grow; other metrics are of the step, or of the moment."""

    name: str
    unit: str
    meaning: str
    counts: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        parts, at = "", 0
        for part in _PART.finditer(self.name):
            parts += re.escape(self.name[at : part.start()]) + ("(.+)" if part[2] else "([^/]+)")
            at = part.end()
        return re.compile(parts + re.escape(self.name[at:]))

    @property
    def parts(self) -> tuple[str, ...]:
        """The texts between the brackets, in the order of the pattern's groups."""
        return tuple(part[1] for part in _PART.finditer(self.name))


@dataclass(frozen=True, slots=True)
class Chapter:
    """Metrics under one heading of the page."""

    title: str
    metrics: tuple[Metric, ...]


def _counts(name: str, unit: str, meaning: str) -> Metric:
    return Metric(name, unit, meaning, counts=True)


CHAPTERS = (
    Chapter(
        "Time of a step",
        (
            Metric("version", "version", "The published weight version."),
            Metric("time/step", "s", "From the end of the step before to the end of this one."),
            Metric("time/wait_for_groups", "s", "The trainer waited for finished groups: the servers are slower."),
            Metric("time/train", "s", "Scoring, forward and backward passes and optimizer steps."),
            Metric("time/sync", "s", "Publishing the weights; 0 in steps that publish nothing."),
            Metric("time/turns", "s", "Handing the devices over between servers and ranks (`cluster.colocate`)."),
        ),
    ),
    Chapter(
        "Training",
        (
            Metric("train/reward", "reward", "Mean over the trained samples, penalties included."),
            Metric(
                "train/reward_std",
                "reward",
                "Standard deviation of the rewards of all samples that `train/reward` is the mean of.",
            ),
            Metric(
                "train/uniform_groups",
                "share",
                "Groups whose rewards are all equal, or that have one only, of all groups of the step.",
            ),
            Metric(
                "train/loss", "", "Policy loss with its KL and entropy terms, mean over the applied optimizer steps."
            ),
            Metric(
                "train/grad_norm", "", "Norm of all gradients before clipping, mean over the applied optimizer steps."
            ),
            Metric("train/lr", "", "Learning rate of the last applied optimizer step."),
            Metric("train/sequences", "responses", "Responses with a reward; several of a sample that forked."),
            Metric("train/tokens", "tokens", "Trained tokens of these responses."),
            Metric(
                "train/computed_tokens",
                "tokens",
                "Trained tokens that the applied optimizer steps computed. Responses with an advantage of 0 are left "
                "out if nothing else, such as a KL or entropy term, gives them a gradient.",
            ),
            Metric("train/tokens_per_second", "tokens/s", "Trained tokens by wall time, over the latest ten steps."),
            Metric("train/seconds", "s", "The step on a trainer rank."),
            Metric(
                "train/mfu",
                "share",
                "Model FLOPs utilization: `train/tflops_per_device` by the peak of a device, if that is known.",
            ),
            Metric("train/tflops_per_device", "TFLOP/s", "Operations of the model in `train/seconds`, by device."),
            Metric(
                "train/tokens_per_second_per_device",
                "tokens/s",
                "Tokens of prompts and responses that were computed in `train/seconds`, by device.",
            ),
            Metric("train/skipped", "steps", "Optimizer steps skipped because a loss or gradient was not finite."),
            Metric(
                "train/without_gradient",
                "steps",
                "Optimizer steps not taken because no response had a gradient, as with equal rewards in each group.",
            ),
            Metric("train/staleness_mean", "versions", "Age of the oldest trained token of a response, mean."),
            Metric("train/staleness_max", "versions", "The same, of the oldest response."),
            Metric("train/token_staleness", "versions", "Age of a trained token, mean."),
            Metric("train/token_staleness@<versions>", "share", "Trained tokens of that age; the last includes older."),
            Metric("train/response_length", "tokens", "Length of a trained response, mean."),
            Metric(
                "train/response_length_<percentile>",
                "tokens",
                "The same, p50, p90 and p99. Below `rollout/response_length_<percentile>`, long responses are lost.",
            ),
            Metric("train/entropy", "nats", "Entropy of the policy, mean over the computed tokens."),
            Metric(
                "train/kl",
                "nats",
                "KL estimate of policy against reference (`algorithm.kl_kind`), mean over the computed tokens.",
            ),
            Metric(
                "train/approx_kl",
                "nats",
                "KL of the policy before the step against what earlier optimizer steps of the batch have made of it "
                "(k3), mean over the computed tokens; 0 with one optimizer step a batch.",
            ),
            Metric(
                "train/reward_penalty",
                "reward",
                "KL penalty of a sample, mean over all samples (`algorithm.kl_in: reward`).",
            ),
            Metric(
                "train/teacher_kl",
                "nats",
                "Policy's minus teacher's log-prob before the step, mean over the computed tokens that have a teacher.",
            ),
            Metric(
                "train/clip_fraction",
                "share",
                "Computed tokens that a bound of the loss limited; with kl_cov, that it penalised.",
            ),
            Metric("train/dual_clip_fraction", "share", "Computed tokens that the second bound of the loss limited."),
            Metric(
                "train/logprob_diff",
                "nats",
                "Absolute gap between the trainer's log-prob before the step and the server's, mean over the computed "
                "tokens.",
            ),
            Metric(
                "train/server_kl@<versions>",
                "nats",
                "KL of server against trainer (k3), mean over the computed tokens of that age or, last, above it.",
            ),
            Metric(
                "train/is_weight_mean",
                "",
                "Weight of the off-policy correction, mean over the computed tokens; 0 for rejected ones.",
            ),
            Metric("train/is_outside_fraction", "share", "Computed tokens whose weight was truncated or masked."),
            Metric("train/is_rejected_fraction", "share", "Computed tokens of rejected responses."),
            Metric(
                "train/is_effective_share",
                "share",
                "Effective sample size of the weights, by the number of computed tokens.",
            ),
            Metric(
                "train/merged_cosine",
                "",
                "Cosine of the change that adapters make and of that which merged weights in bfloat16 have of it; with "
                "1, servers sample what is trained.",
            ),
            Metric(
                "norms/grad/<layers>",
                "",
                "Norm of the gradients of a group of layers, before clipping, in the last applied optimizer step.",
            ),
            Metric("norms/weight/<layers>", "", "Norm of its weights (`observe.norms_every`)."),
            Metric("trainer/data_parallel", "ranks", "Data-parallel size of the trainer."),
        ),
    ),
    Chapter(
        "Critic",
        (
            Metric("critic/loss", "", "Value loss, mean over its applied optimizer steps."),
            Metric(
                "critic/grad_norm", "", "Norm of its gradients before clipping, mean over its applied optimizer steps."
            ),
            Metric("critic/lr", "", "Learning rate of its last optimizer step."),
            Metric("critic/skipped", "steps", "Its optimizer steps that were skipped because a number was not finite."),
            Metric("critic/clip_fraction", "share", "Trained tokens of the applied steps whose value was clipped."),
            Metric("critic/value_mean", "reward", "Value before the step, mean over the same tokens."),
            Metric("critic/return_mean", "reward", "Return, mean over the same tokens."),
            Metric(
                "critic/explained_variance",
                "share",
                "Variance of their returns that the values before the step explain; 1 is perfect.",
            ),
        ),
    ),
    Chapter(
        "Supervised training",
        (
            Metric("sft/loss", "nats", "Negative log-prob of a trained token, mean, before the step."),
            Metric("sft/validation_loss", "nats", "The same of the held-out rows."),
        ),
    ),
    Chapter(
        "Held-out evaluation",
        (
            Metric("eval/score", "share", "Score of the first set at its first temperature: what a run can stop at."),
            Metric("eval/version", "version", "The evaluated version, which was published when the evaluation began."),
            Metric("eval/exact_share", "share", "Sampled tokens of that version; always 1 with `eval.exact`."),
            Metric("eval/failed", "answers", "Answers that failed, of all sets."),
            Metric("eval/seconds", "s", "Duration of the evaluation."),
            Metric("eval/score@<temperature>", "share", "Share of right answers, of the set under `data.eval`."),
            Metric("eval/reward@<temperature>", "reward", "Mean reward."),
            Metric("eval/pass<k>@<temperature>", "share", "Prompts with a right answer among k (`eval.repeats`)."),
            Metric("eval/<set>/score", "share", "Score of a named set at its first temperature."),
            Metric("eval/<set>/failed", "answers", "Its answers that failed."),
            Metric("eval/<set>/score@<temperature>", "share", "Share of right answers of a named set."),
            Metric("eval/<set>/reward@<temperature>", "reward", "Mean reward of a named set."),
            Metric("eval/<set>/pass<k>@<temperature>", "share", "Prompts with a right answer among k, of a named set."),
        ),
    ),
    Chapter(
        "Rollouts",
        (
            Metric(
                "rollout/reward_mean", "reward", "Mean reward of the samples of the latest groups, also dropped ones."
            ),
            Metric("rollout/baseline", "reward", "Mean reward of greedy responses (`algorithm.advantage: remax`)."),
            Metric("rollout/response_length", "tokens", "Mean length of the latest responses."),
            Metric(
                "rollout/response_length_<percentile>",
                "tokens",
                "Of the latest responses, p50, p90 and p99; dropped ones included, aborted ones not.",
            ),
            Metric("rollout/truncated_share", "share", "Latest responses that reached the maximum length."),
            _counts("rollout/tokens", "tokens", "Generated tokens, also of responses that are not trained."),
            Metric("rollout/tokens_per_second", "tokens/s", "Generated tokens of the last 30 seconds."),
            _counts("rollout/groups", "groups", "Groups that were finished."),
            _counts(
                "rollout/groups_regenerated", "groups", "Groups that were generated again, since their tokens were old."
            ),
            _counts("rollout/groups_dropped", "groups", "Groups that were dropped, for any reason."),
            _counts(
                "rollout/dropped_<reason>",
                "groups",
                "Groups that were dropped for this reason ([buffer.md](buffer.md)).",
            ),
            _counts("rollout/samples_failed", "samples", "Samples whose workflow or reward raised."),
            _counts(
                "rollout/samples_unused", "samples", "Samples that were generated and not needed (`rollout.groups`)."
            ),
            _counts("rollout/responses_overlong", "responses", "Responses that were too long to be trained."),
            _counts("rollout/server_failures", "samples", "Samples that were repeated because servers failed."),
            _counts("rollout/invalid_answers", "answers", "Answers of servers that were discarded."),
            Metric("rollout/inflight_groups", "groups", "Groups in generation."),
            Metric("rollout/inflight_requests", "requests", "Requests at the servers."),
            Metric("rollout/inflight_limit", "requests", "How many requests are sent at a time, as the caches allow."),
            Metric("rollout/kv_usage", "share", "Use of the fullest server's cache."),
            Metric("rollout/workers", "processes", "Rollout workers."),
            _counts("rollout/workers_lost", "processes", "Rollout workers that died or hung."),
            Metric("rollout/suspect_prompts", "prompts", "Prompts that may have killed a server."),
            Metric("rollout/poison_prompts", "prompts", "Prompts that killed servers, and are never sent again."),
            Metric("rollout/worker_suspects", "prompts", "Prompts whose code may have killed a worker."),
            Metric("rollout/worker_poison", "prompts", "Prompts whose code killed workers, and which are dropped."),
            Metric("rollout/reward/<function>", "reward", "Mean of one reward function over the latest groups."),
            Metric("rollout/reward/<function>/none", "share", "Samples that it declined to score."),
            Metric("rollout/reward@<set>", "reward", "Mean reward of the latest groups of one of `data.sets`."),
            Metric("rollout/turns", "turns", "Turns of a conversation, mean."),
            Metric("rollout/turns_realigned", "turns", "Turns whose history the template would have rewritten, mean."),
            Metric("rollout/turns_forked", "turns", "Turns after which a conversation forked, mean."),
            Metric("rollout/tool_<kind>", "calls", "Tool calls of a sample, mean: calls, errors, timeouts, and so on."),
            Metric("rollout/environment/turns", "turns", "Turns of an episode, mean."),
            Metric("rollout/environment/finished", "share", "Episodes that came to their end."),
            Metric("rollout/<metric...>", "", "Mean of a workflow's own metric over the samples that have it."),
        ),
    ),
    Chapter(
        "Buffer",
        (
            Metric("buffer/generating", "groups", "Places of the buffer whose group is generated."),
            Metric("buffer/returned", "groups", "Groups that wait to be generated again or by another worker."),
            Metric("buffer/finished", "groups", "Groups that wait for the trainer."),
            Metric("buffer/leased", "groups", "Groups that are being trained."),
            Metric("buffer/unpublished", "groups", "Trained groups whose step is not published yet."),
            _counts("groups/admitted", "groups", "Prompts that were admitted since the run began."),
            _counts(
                "groups/trained", "groups", "Groups that were trained. Admitted is trained plus dropped plus live."
            ),
            _counts("groups/dropped", "groups", "Groups that were dropped."),
            Metric("groups/live", "groups", "Groups that are neither trained nor dropped."),
            _counts("groups/regenerated", "groups", "Groups that were generated again."),
            _counts(
                "groups/damaged", "groups", "Groups whose recorded bytes were damaged, and which were generated again."
            ),
            _counts("groups/masked_tokens", "tokens", "Tokens that were masked because they were too old."),
        ),
    ),
    Chapter(
        "Weight sync",
        (
            Metric("sync/version", "version", "The version that was published."),
            Metric("sync/bytes", "bytes", "Bytes that left the trainer."),
            Metric("sync/bytes_per_second", "bytes/s", "The same by the time in which they moved."),
            Metric("sync/pause_seconds", "s", "The longest time that a server generated nothing."),
            Metric(
                "sync/<phase>_seconds",
                "s",
                "Time of one phase, of the slowest rank or server ([weight_sync.md](weight_sync.md)).",
            ),
            Metric("sync/parity", "nats", "Largest gap of log-probs between trainer and servers, on probe prompts."),
            Metric("sync/parity_failures", "servers", "Servers whose gap was above the threshold."),
            Metric("sync/parity_seconds", "s", "Duration of that check."),
        ),
    ),
    Chapter(
        "Servers",
        (
            Metric("fleet/healthy", "servers", "Servers that serve."),
            Metric("fleet/suspect", "servers", "Servers that missed a probe."),
            Metric("fleet/stale", "servers", "Servers that wait for the weights."),
            Metric("fleet/dead", "servers", "Servers that were declared dead."),
            Metric("fleet/restarting", "servers", "Servers that start."),
            Metric("fleet/isolated", "servers", "Servers that only get prompts that may be deadly."),
            Metric("fleet/pinned", "servers", "Servers that are kept at a version for an evaluation (`eval.exact`)."),
            _counts("fleet/restarts", "restarts", "Restarts of servers."),
            _counts("fleet/router_restarts", "restarts", "Restarts of the router."),
            _counts(
                "fleet/gray_<fault>",
                "servers",
                "Servers that were replaced: invalid answers, slow (beside the others), parity (wrong log-probs).",
            ),
        ),
    ),
    Chapter(
        "Frozen models",
        (
            *(
                metric
                for kind, what in (
                    ("reward_models", "a reward model"),
                    ("auxiliary_models", "an auxiliary model"),
                    ("teachers", "a teacher"),
                )
                for metric in (
                    Metric(f"{kind}/<name>/servers", "servers", f"Servers of {what} that are up."),
                    _counts(f"{kind}/<name>/restarts", "restarts", "Their restarts."),
                    _counts(f"{kind}/<name>/requests", "requests", "Requests that were answered."),
                    _counts(f"{kind}/<name>/retries", "requests", "Attempts that failed."),
                    Metric(f"{kind}/<name>/inflight", "requests", "Requests at its servers."),
                )
            ),
            _counts("reward_models/<name>/unread", "responses", "Responses whose score could not be read."),
            _counts("reward_models/<name>/too_long", "responses", "Responses that were longer than its context."),
            _counts("teachers/<name>/too_long", "responses", "Responses that were longer than its context."),
        ),
    ),
    Chapter(
        "Faults",
        (
            _counts("faults/trainer_restarts", "restarts", "Restarts of the trainer ranks."),
            _counts("faults/steps_trained_again", "steps", "Steps that were repeated after a restart."),
            _counts("faults/steps_set_aside", "steps", "Batches that failed too often, and were set aside."),
            _counts("faults/failed_publishes", "publishes", "Publishes that failed for at least one server."),
            _counts("faults/servers_joined", "servers", "Servers that joined a running run."),
            _counts("faults/abandoned_evaluations", "evaluations", "Evaluations of an exact version without a score."),
            _counts("faults/parity_restarts", "restarts", "Servers that were restarted because of a parity check."),
        ),
    ),
)

METRICS = tuple(metric for chapter in CHAPTERS for metric in chapter.metrics)
HEADER = """# Metrics

Written by `python -m megasync.observe.registry`; edit megasync/observe/registry.py instead.

A run writes them to `RUN/metrics.jsonl`, a line a step or evaluation, and to TensorBoard. A line has only what was
measured. Parts in `<...>` are chosen by the configuration, a dataset or a function. Metrics that *count* begin again
when a run is resumed, except `groups/*`, which count since the run began; the others are of the step or of the moment.
Null stands for a number that is not finite.
"""


@lru_cache(maxsize=4096)
def metric_of(name: str) -> Metric | None:
    """The metric that a logged name belongs to; None if it is unknown. Exact names come before patterns."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


def page() -> str:
    """The page docs/metrics.md."""
    parts = [HEADER]
    for chapter in CHAPTERS:
        rows = [
            f"| `{metric.name}` | {metric.unit}{', counts' if metric.counts else ''} | {metric.meaning} |"
            for metric in chapter.metrics
        ]
        parts.append("\n".join([f"## {chapter.title}\n", "| metric | unit | meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    atomic_write(PAGE, page())
    sys.stdout.write(f"wrote {PAGE}\n")
