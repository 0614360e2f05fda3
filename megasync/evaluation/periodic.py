"""Evaluation during a run: the scores of a version, and which versions really answered.

Invariant: the score of a pinned version (`eval.exact`) comes from answers of which every sampled token is of that
version. `exact_answer` checks each answer before it is counted; one of another version leaves no score at all.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import EvaluationAbandoned
from megasync.evaluation.evaluate import Answer, AnswerJob, HeldOutAnswer, evaluate, metrics_of
from megasync.evaluation.held_out import HeldOutSet
from megasync.rollout.client import PinnedVersion


async def exact_answer(answer: Answer, pinned: PinnedVersion, job: AnswerJob) -> HeldOutAnswer:
    """Has an answer given by a pinned version, and again where the version still is if its server is lost.

    Raises EvaluationAbandoned when the version is nowhere, and for an answer of another version.
    """
    if job.by_adapter:
        # Its score is that of the adapter, whatever the policy's version.
        return await answer(job)
    while True:
        destination = await pinned.destination(job.number)
        answering = asyncio.ensure_future(answer(job, destination))
        lost = asyncio.create_task(pinned.lost(destination), name="pinned version lost")
        try:
            await asyncio.wait({answering, lost}, return_when=asyncio.FIRST_COMPLETED)
            # An answer may fail because its server is lost.
            if answering.done() and not (lost.done() and answering.result().reward is None):
                if others := answering.result().versions.keys() - {pinned.version}:
                    raise EvaluationAbandoned(
                        f"an answer to prompt {job.number} has tokens of version {min(others)}, but version "
                        f"{pinned.version} is evaluated"
                    )
                return answering.result()
        finally:
            await cancel_and_wait(answering, lost)


@dataclass(frozen=True, slots=True)
class PeriodicEvaluation:
    """The run's evaluation, called as `await evaluation(step, version, pinned)`.

    The run's score is that of the first set at its first temperature.
    """

    # The first three fields are as in `evaluate`.
    answer: Answer
    sets: Sequence[HeldOutSet]
    max_inflight: int
    # Called with step, version and (prompt, text, reward) of the answers to the first `shown` prompts of that set at
    # that temperature.
    on_answers: Callable[[int, int, Sequence[tuple[str, str, float | None]]], None] = field(
        default=lambda step, version, answers: None, kw_only=True
    )
    shown: int = field(default=0, kw_only=True)

    async def __call__(self, step: int, version: int, pinned: PinnedVersion | None = None) -> dict[str, float]:
        """The metrics of `metrics_of`, and eval/version, eval/exact_share and eval/seconds.

        With a `pinned` version all answers are of it. Raises EvaluationAbandoned if that cannot be.
        """
        start = time.monotonic()
        first = self.sets[0].name, self.sets[0].temperatures[0]
        kept: dict[int, HeldOutAnswer] = {}
        tokens: Counter[int] = Counter()

        def keep(answer: HeldOutAnswer) -> None:
            tokens.update(answer.versions)
            shown = answer.number < self.shown and answer.repeat == 0 and answer.reward is not None
            if shown and (answer.held_out, answer.temperature) == first:
                kept[answer.number] = answer

        answer = self.answer if pinned is None else partial(exact_answer, self.answer, pinned)
        scores = await evaluate(answer, self.sets, self.max_inflight, keep)
        answers = [kept[number] for number in sorted(kept)]
        self.on_answers(step, version, [(answer.prompt, answer.text, answer.reward) for answer in answers])
        metrics = metrics_of(scores) | {"eval/version": float(version), "eval/seconds": time.monotonic() - start}
        if sampled := tokens.total():
            metrics["eval/exact_share"] = tokens[version] / sampled
        return metrics
