"""Held-out evaluation: fixed sets of prompts through the same workflow and rewards as training.

Invariant: at most `max_inflight` answers are in flight over all sets, and only counts are kept of completed ones. A
failed answer affects no other; it counts as wrong, so failures never make a model look better.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any, Protocol

from megasync.base.importing import name_of
from megasync.concurrency.foreign import explain, run
from megasync.concurrency.tasks import Backoff, cancel_and_wait
from megasync.errors import DataError, failed_service
from megasync.evaluation.held_out import HeldOutSet
from megasync.observe import trace
from megasync.rollout.client import ANYWHERE, Destination, RolloutClient
from megasync.rollout.group_worker import BACKOFF_SECONDS, MAX_REPEATS
from megasync.rollout.inflight import RequestGate
from megasync.rollout.workflow import SampleClient, TrajectoryCheck, Workflow, call_workflow, request_seed
from megasync.trajectory import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """One of the model's answers to a held-out prompt."""

    held_out: str
    temperature: float
    # The prompt of the set, and the answer to it.
    number: int
    repeat: int
    prompt: str
    text: str = ""
    reward: float | None = None
    # What failed, without a reward.
    error: str = ""
    # Sampled tokens of all its requests by version; empty if an adapter answered for the set.
    versions: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldOutScores:
    """The scores of one set at one temperature."""

    held_out: str
    temperature: float
    # The share of all `n` answers with a reward of 1.0.
    score: float
    # The mean over the scored answers.
    reward: float
    n: int
    failed: int
    # The mean pass@k over the prompts, by k.
    pass_at: dict[int, float]


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """One answer to generate. Plain data, which travels to a worker."""

    held_out: str
    temperature: float
    # The prompt, its number in the set, and which of the answers to it this one is.
    number: int
    prompt: Prompt
    repeat: int
    # Whether an adapter answers for the set in place of the policy.
    by_adapter: bool = False

    @property
    def key(self) -> str:
        """Names the prompt. Rows of other sets, and training prompts, have the same uids."""
        return f"eval:{self.held_out}:{self.prompt.uid}"

    def answer(self, text: str, reward: float | None, **about: Any) -> HeldOutAnswer:
        prompt = self.prompt.columns.get("prompt", "")
        # Of a chat, the last message.
        shown = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        return HeldOutAnswer(self.held_out, self.temperature, self.number, self.repeat, shown, text, reward, **about)

    def failed(self, error: BaseException) -> HeldOutAnswer:
        """The answer to a prompt that could not be answered because of this error."""
        return self.answer("", None, error=explain(error))


class Answer(Protocol):
    """Gives an answer, whose requests go to a destination. A failed one never raises."""

    def __call__(self, job: AnswerJob, destination: Destination = ..., /) -> Awaitable[HeldOutAnswer]: ...


async def evaluate(
    answer: Callable[[AnswerJob], Awaitable[HeldOutAnswer]],
    sets: Sequence[HeldOutSet],
    max_inflight: int,
    on_answer: Callable[[HeldOutAnswer], None] = lambda answer: None,
) -> list[HeldOutScores]:
    """Scores every set at each of its temperatures (0 is greedy), in this order.

    `on_answer` is called with each answer as it completes; one that failed counts as wrong.
    Raises DataError for a set without prompts.
    """
    for held_out in sets:
        if not held_out.prompts:
            raise DataError(f"the evaluation set {held_out.name!r} has no prompts")
    counts: defaultdict[tuple[str, float], _Counts] = defaultdict(_Counts)
    jobs = _jobs(sets)

    async def work() -> None:
        for job in jobs:
            result = await answer(job)
            counts[result.held_out, result.temperature].add(result)
            on_answer(result)

    tasks = [asyncio.create_task(work(), name=f"evaluation {n}") for n in range(max_inflight)]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)
    return [
        _scores(held_out, temperature, counts[held_out.name, temperature])
        for held_out in sets
        for temperature in held_out.temperatures
    ]


def _jobs(sets: Sequence[HeldOutSet]) -> Iterator[AnswerJob]:
    """Lazily: a worker takes the next job once it is free."""
    for held_out in sets:
        by_adapter = held_out.adapter is not None
        for temperature in held_out.temperatures:
            for number, prompt in enumerate(held_out.prompts):
                for repeat in range(held_out.repeats_at(temperature)):
                    yield AnswerJob(held_out.name, temperature, number, prompt, repeat, by_adapter)


@dataclass(slots=True)
class _Counts:
    """Of one set at one temperature. `right` counts right answers by prompt."""

    scored: int = 0
    rewards: float = 0.0
    failed: int = 0
    first_problem: str = ""
    right: Counter[int] = field(default_factory=Counter)

    def add(self, answer: HeldOutAnswer) -> None:
        if answer.reward is None:
            self.failed += 1
            self.first_problem = self.first_problem or answer.error
            return
        self.scored += 1
        self.rewards += answer.reward
        if answer.reward == 1.0:
            self.right[answer.number] += 1


class Answerer:
    """Answers prompts of held-out sets, with the workflow of training. A failed answer never raises.

    With `seed`, requests carry seeds derived from (seed, set, prompt, repeat, turn).
    """

    def __init__(
        self, client: RolloutClient, workflow: Workflow, sets: Iterable[HeldOutSet], seed: int | None = None
    ) -> None:
        self._client = client
        self._workflow = workflow
        self._sets = {held_out.name: held_out for held_out in sets}
        self._check = TrajectoryCheck(workflow)
        self._seed = seed
        self._gate = RequestGate()

    async def __call__(self, job: AnswerJob, destination: Destination = ANYWHERE, /) -> HeldOutAnswer:
        repeats, backoff = 0, Backoff(BACKOFF_SECONDS)
        while True:
            client = self._sample_client(job, destination)
            try:
                text, reward = await self._answer(client, job)
                return job.answer(text, reward, versions={} if job.by_adapter else _versions(client))
            except Exception as error:
                # A user's workflow or reward, or a server, failed: this answer counts as failed, logged in `_scores`.
                log.debug("Evaluation prompt %s of %r failed", job.prompt.uid, job.held_out, exc_info=error)
                if failed_service(error) is None or repeats == MAX_REPEATS:
                    return job.failed(error)
            # An environment or tool server failed, which says nothing of the model.
            repeats += 1
            await asyncio.sleep(backoff.next())

    def _sample_client(self, job: AnswerJob, destination: Destination) -> SampleClient:
        held_out, seed = self._sets[job.held_out], None
        if self._seed is not None:
            seed = request_seed(self._seed, job.prompt.uid, *filter(None, (job.held_out, job.repeat)))
        where = {"adapter": held_out.adapter or destination.adapter, "server": destination.server}
        sampling = {**held_out.sampling, "temperature": job.temperature, **where}
        return SampleClient(self._client, self._gate, routing_key=job.key, seed=seed, **sampling)

    async def _answer(self, client: SampleClient, job: AnswerJob) -> tuple[str, float]:
        name, prompt = f"the workflow {name_of(self._workflow)}", job.prompt
        with trace.about(uid=job.key):
            trajectories = await run(call_workflow, name, None, self._workflow, client, prompt, self._check)
            scored = await self._sets[job.held_out].rewards.score(trajectories, prompt.columns, prompt.uid)
        rewards = [t.reward for t in scored if t.reward is not None]
        if not rewards:
            raise DataError(f"the reward function did not score prompt {prompt.uid}")
        return scored[-1].text, sum(rewards) / len(rewards)


def _versions(client: SampleClient) -> dict[int, int]:
    """The sampled tokens of all requests by version, also of those that the workflow discarded: they led to others."""
    counts: Counter[int] = Counter()
    for generation in client.conversation.generations:
        for version, tokens in generation.spans:
            counts[version] += tokens
    return dict(counts)


def _scores(held_out: HeldOutSet, temperature: float, counts: _Counts) -> HeldOutScores:
    repeats = held_out.repeats_at(temperature)
    total = repeats * len(held_out.prompts)
    if counts.failed:
        log.warning(
            "%d of %d evaluation answers%s failed; first error: %s",
            counts.failed,
            total,
            f" of {held_out.name}" if held_out.name else "",
            counts.first_problem,
        )
    passed = {
        k: sum(pass_at_k(repeats, right, k) for right in counts.right.values()) / len(held_out.prompts)
        for k in reported_ks(repeats)
    }
    return HeldOutScores(
        held_out=held_out.name,
        temperature=temperature,
        score=counts.right.total() / total,
        reward=counts.rewards / counts.scored if counts.scored else 0.0,
        n=total,
        failed=counts.failed,
        pass_at=passed,
    )


def pass_at_k(n: int, right: int, k: int) -> float:
    """The unbiased estimate of pass@k from `n` answers, `right` of them right: 1 - C(n - right, k) / C(n, k).

    From "Evaluating Large Language Models Trained on Code" (Chen et al., 2021, arXiv:2107.03374), equation 1. Raises
    ValueError unless 1 <= k <= n and 0 <= right <= n.
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} is not defined for {right} right answers of {n}")
    return 1.0 - comb(n - right, k) / comb(n, k)


def reported_ks(n: int) -> list[int]:
    """The values of k to report for `n` answers: powers of two, and n itself; none for a single answer."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n}) if n > 1 else []


def metrics_of(scores: Sequence[HeldOutScores]) -> dict[str, float]:
    """`eval/score` of the first entry, and the `eval/failed` answers of all.

    Then, under `eval/` or, for a named set, `eval/<set>/`: `score`, at its first temperature; `failed`; and for each
    temperature t `score@t`, `reward@t` and `pass<k>@t`.
    """
    metrics = {"eval/score": scores[0].score, "eval/failed": float(sum(each.failed for each in scores))}
    for each in scores:
        prefix = f"eval/{each.held_out}/" if each.held_out else "eval/"
        if each.held_out:
            metrics.setdefault(f"{prefix}score", each.score)
            metrics[f"{prefix}failed"] = metrics.get(f"{prefix}failed", 0.0) + each.failed
        metrics[f"{prefix}score@{each.temperature:g}"] = each.score
        metrics[f"{prefix}reward@{each.temperature:g}"] = each.reward
        for k, share in each.pass_at.items():
            metrics[f"{prefix}pass{k}@{each.temperature:g}"] = share
    return metrics
