"""Held-out evaluation: fixed sets of prompts through the same workflow and rewards as training.

Invariant: at most `max_inflight` answers are under way over all sets, nothing but counts is kept of those that are done,
and one that fails costs itself only: it is counted as wrong, so failures never make a model look better.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasync.errors import DataError
from megasync.evaluation.pass_at_k import counted, pass_at_k
from megasync.failures import cancellation_requested
from megasync.rewards import RewardRunner
from megasync.rollout.inflight import RequestGate
from megasync.rollout.sample_client import SampleClient, request_seed
from megasync.rollout.workflow import TrajectoryCheck, Workflow
from megasync.trajectory import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    """`name` is empty for the one set that has none. `sampling` replaces what the run samples with, but its temperature."""

    name: str
    prompts: Sequence[Prompt]
    rewards: RewardRunner
    temperatures: Sequence[float] = (0.0,)
    # Answers to each prompt at temperatures above 0; a greedy one would always be the same.
    repeats: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def repeats_at(self, temperature: float) -> int:
        return self.repeats if temperature > 0 else 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer number `repeat` to prompt `number` of a set. Without a reward, `error` says what failed."""

    held_out: str
    temperature: float
    number: int
    repeat: int
    prompt: str
    text: str = ""
    reward: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of one set at one temperature. `score` is the share of all `n` answers with a reward of 1.0, `reward` the mean over
    those that were scored, `pass_at` the mean over the prompts by k."""

    held_out: str
    temperature: float
    score: float
    reward: float
    n: int
    failed: int
    pass_at: dict[int, float]


# One answer that is to be had: set, temperature, number and prompt, repeat.
_Job = tuple[HeldOutSet, float, int, Prompt, int]


async def evaluate(
    client: Any,
    sets: Sequence[HeldOutSet],
    workflow: Workflow,
    max_inflight: int,
    seed: int | None = None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[Evaluation]:
    """Scores every set at each of its temperatures (0 is greedy), in this order. A failed answer never raises.

    With `seed`, requests carry seeds drawn from (seed, set, prompt, repeat, turn). `on_answer` hears of each answer as it
    ends. Raises DataError for a set without a prompt.
    """
    for held_out in sets:
        if not held_out.prompts:
            raise DataError(f"an evaluation needs at least one prompt, and the set {held_out.name!r} has none")
    evaluator = _Evaluator(client, workflow, seed, on_answer)
    jobs = _jobs(sets)
    workers = [asyncio.create_task(evaluator.work(jobs), name=f"evaluation {n}") for n in range(max_inflight)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [evaluator.result(held_out, temperature) for held_out in sets for temperature in held_out.temperatures]


def _jobs(sets: Sequence[HeldOutSet]) -> Iterator[_Job]:
    """One at a time: whoever takes the next has room for it."""
    for held_out in sets:
        for temperature in held_out.temperatures:
            for number, prompt in enumerate(held_out.prompts):
                for repeat in range(held_out.repeats_at(temperature)):
                    yield held_out, temperature, number, prompt, repeat


@dataclass(slots=True)
class _Tally:
    """Counts of one set at one temperature. `right` is by prompt, of those with any."""

    scored: int = 0
    rewards: float = 0.0
    failed: int = 0
    first_problem: str = ""
    right: Counter[int] = field(default_factory=Counter)

    def add(self, answer: Answer) -> None:
        if answer.reward is None:
            self.failed += 1
            self.first_problem = self.first_problem or answer.error
            return
        self.scored += 1
        self.rewards += answer.reward
        if answer.reward == 1.0:
            self.right[answer.number] += 1


class _Evaluator:
    """What the workers of one evaluation share."""

    def __init__(self, client: Any, workflow: Workflow, seed: int | None, on_answer: Callable[[Answer], None]) -> None:
        self._client = client
        self._workflow = workflow
        self._check = TrajectoryCheck(workflow)
        self._seed = seed
        self._on_answer = on_answer
        self._gate = RequestGate()
        self._tallies: dict[tuple[str, float], _Tally] = {}

    async def work(self, jobs: Iterator[_Job]) -> None:
        for held_out, temperature, number, prompt, repeat in jobs:
            asked = {"held_out": held_out.name, "temperature": temperature, "number": number, "repeat": repeat}
            try:
                text, reward = await self._answer(held_out, temperature, prompt, repeat)
                answer = Answer(prompt=_text_of(prompt), text=text, reward=reward, **asked)
            except (Exception, asyncio.CancelledError) as error:
                # A user's workflow or reward, or a server: one answer less, said below.
                if cancellation_requested(error):
                    raise
                log.debug("evaluation prompt %s of %r failed", prompt.uid, held_out.name, exc_info=error)
                answer = Answer(prompt=_text_of(prompt), error=f"{type(error).__name__}: {error}", **asked)
            self._tallies.setdefault((held_out.name, temperature), _Tally()).add(answer)
            self._on_answer(answer)

    async def _answer(self, held_out: HeldOutSet, temperature: float, prompt: Prompt, repeat: int) -> tuple[str, float]:
        seed = None
        if self._seed is not None:
            further = [part for part in (held_out.name, repeat) if part]
            seed = request_seed(self._seed, prompt.uid, *further)
        sampling = {**held_out.sampling, "temperature": temperature}
        # Rows of other sets, and prompts that are trained, have the same uids.
        key = f"eval:{held_out.name}:{prompt.uid}"
        client = SampleClient(self._client, self._gate, routing_key=key, seed=seed, **sampling)
        sample = copy.deepcopy(prompt.columns) | {"prompt_ids": list(prompt.prompt_ids)}
        trajectories = self._check.check(await self._workflow(client, sample))
        scored = await held_out.rewards.score(trajectories, prompt.columns, prompt.uid)
        rewards = [t.reward for t in scored if t.reward is not None]
        if not rewards:
            raise DataError(f"prompt {prompt.uid} was left unscored")
        return scored[-1].text, sum(rewards) / len(rewards)

    def result(self, held_out: HeldOutSet, temperature: float) -> Evaluation:
        tally = self._tallies[held_out.name, temperature]
        repeats = held_out.repeats_at(temperature)
        total = repeats * len(held_out.prompts)
        if tally.failed:
            log.warning(
                "%d of %d evaluation answers%s failed; the first: %s",
                tally.failed,
                total,
                f" of {held_out.name}" if held_out.name else "",
                tally.first_problem,
            )
        passed = {
            k: sum(pass_at_k(repeats, right, k) for right in tally.right.values()) / len(held_out.prompts)
            for k in counted(repeats)
        }
        return Evaluation(
            held_out=held_out.name,
            temperature=temperature,
            score=tally.right.total() / total,
            reward=tally.rewards / tally.scored if tally.scored else 0.0,
            n=total,
            failed=tally.failed,
            pass_at=passed,
        )


def _text_of(prompt: Prompt) -> str:
    """A prompt's own text; of a chat, the last message's."""
    text = prompt.columns.get("prompt", "")
    return text if isinstance(text, str) else str(text[-1]["content"])
