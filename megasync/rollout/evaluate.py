"""Held-out evaluation: a fixed set of prompts through the same workflow and reward as training.

Invariant: at most `max_inflight` prompts are under way, and a prompt that fails costs itself only: it is counted, and
the score is still over all prompts, so failures never make a model look better.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megasync.buffer.trajectory import Prompt
from megasync.errors import DataError
from megasync.rewards import RewardRunner
from megasync.rollout.requests import RequestGate, SampleClient, request_seed
from megasync.rollout.workflow import Workflow, as_trajectories

log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """One prompt's text, the model's answer to it, and its reward."""

    prompt: str
    text: str
    reward: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`score` is the share of all `n` prompts with a reward of 1.0, `reward` the mean over those that were scored."""

    score: float
    reward: float
    n: int
    failed: int
    # In the order of the prompts; failed ones are missing.
    answers: list[Answer]


async def evaluate(
    client: Any,
    prompts: Sequence[Prompt],
    workflow: Workflow,
    rewards: RewardRunner,
    temperature: float,
    samples: int,
    max_inflight: int,
    seed: int | None = None,
) -> Evaluation:
    """Scores the first `samples` prompts at one temperature (0 is greedy). A failed prompt never raises.

    With `seed`, requests carry seeds drawn from (seed, prompt, turn). Raises DataError when there is no prompt.
    """
    chosen = prompts[:samples]
    if not chosen:
        raise DataError("an evaluation needs at least one prompt")
    evaluator = _Evaluator(client, workflow, rewards, temperature, seed)
    numbered = iter(enumerate(chosen))
    workers = [asyncio.create_task(evaluator.work(numbered)) for _ in range(min(max_inflight, len(chosen)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return evaluator.result(len(chosen))


class _Evaluator:
    """What the workers of one evaluation share."""

    def __init__(
        self, client: Any, workflow: Workflow, rewards: RewardRunner, temperature: float, seed: int | None
    ) -> None:
        self._client = client
        self._workflow = workflow
        self._rewards = rewards
        self._temperature = temperature
        self._seed = seed
        self._gate = RequestGate()
        self._answers: dict[int, Answer] = {}
        self._problems: list[str] = []

    async def work(self, prompts: Iterator[tuple[int, Prompt]]) -> None:
        for number, prompt in prompts:
            try:
                self._answers[number] = await self._answer(prompt)
            except Exception as error:  # a user's workflow or reward, or a server: one answer less, said below
                log.debug("evaluation prompt %s failed", prompt.uid, exc_info=error)
                self._problems.append(f"{type(error).__name__}: {error}")

    async def _answer(self, prompt: Prompt) -> Answer:
        seed = None if self._seed is None else request_seed(self._seed, prompt.uid)
        client = SampleClient(
            self._client, self._gate, routing_key=prompt.uid, seed=seed, temperature=self._temperature
        )
        sample = copy.deepcopy(prompt.columns) | {"prompt_ids": list(prompt.prompt_ids)}
        trajectories = as_trajectories(await self._workflow(client, sample), self._workflow)
        scored = await self._rewards.score(trajectories, prompt.columns, prompt.uid)
        rewards = [t.reward for t in scored if t.reward is not None]
        if not rewards:
            raise DataError(f"prompt {prompt.uid} was left unscored")
        return Answer(_text_of(prompt), scored[-1].text, sum(rewards) / len(rewards))

    def result(self, total: int) -> Evaluation:
        if self._problems:
            log.warning(
                "%d of %d evaluation prompts failed; the first: %s", len(self._problems), total, self._problems[0]
            )
        answers = [self._answers[number] for number in sorted(self._answers)]
        return Evaluation(
            score=sum(a.reward == 1.0 for a in answers) / total,
            reward=sum(a.reward for a in answers) / len(answers) if answers else 0.0,
            n=total,
            failed=len(self._problems),
            answers=answers,
        )


def _text_of(prompt: Prompt) -> str:
    """A prompt's own text; of a chat, the last message's."""
    text = prompt.columns.get("prompt", "")
    return text if isinstance(text, str) else str(text[-1]["content"])
