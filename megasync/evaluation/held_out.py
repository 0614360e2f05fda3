"""The run's held-out evaluation: every set at each of its temperatures, the metrics, and the answers people look at."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from megasync.evaluation.evaluate import Answer, Evaluation, HeldOutSet, evaluate
from megasync.rollout.workflow import Workflow

# (training step, weight version, (prompt, text, reward) of the first set's answers at its first temperature)
AnswersSink = Callable[[int, int, Sequence[tuple[str, str, float | None]]], None]


class HeldOut:
    """Called as `await held_out(step, version)`; the score is that of the first set at its first temperature."""

    def __init__(
        self,
        client: Any,
        sets: Sequence[HeldOutSet],
        workflow: Workflow,
        max_inflight: int,
        on_answers: AnswersSink,
        shown: int,
        seed: int | None,
    ) -> None:
        """`on_answers` is given the answers to the first `shown` prompts."""
        self._client = client
        self._sets = sets
        self._workflow = workflow
        self._max_inflight = max_inflight
        self._on_answers = on_answers
        self._shown = shown
        self._seed = seed

    async def __call__(self, step: int, version: int) -> dict[str, float]:
        """Metrics: those of `metrics_of`, and the seconds that it took."""
        start = time.monotonic()
        first = self._sets[0].name, self._sets[0].temperatures[0]
        kept: dict[int, Answer] = {}

        def keep(answer: Answer) -> None:
            shown = answer.number < self._shown and answer.repeat == 0 and answer.reward is not None
            if shown and (answer.held_out, answer.temperature) == first:
                kept[answer.number] = answer

        found = await evaluate(self._client, self._sets, self._workflow, self._max_inflight, self._seed, keep)
        answers = [kept[number] for number in sorted(kept)]
        self._on_answers(step, version, [(answer.prompt, answer.text, answer.reward) for answer in answers])
        return metrics_of(found) | {"eval/seconds": time.monotonic() - start}


def metrics_of(found: Sequence[Evaluation]) -> dict[str, float]:
    """`eval/score` of the first, and `eval/failed` answers of all. Then, as `eval/...` or `eval/<set>/...` of a named set:
    `score`, at its first temperature; `failed`; and per temperature t `score@t`, `reward@t`, `pass<k>@t`."""
    metrics = {"eval/score": found[0].score, "eval/failed": float(sum(each.failed for each in found))}
    for each in found:
        prefix = f"eval/{each.held_out}/" if each.held_out else "eval/"
        if each.held_out:
            metrics.setdefault(f"{prefix}score", each.score)
            metrics[f"{prefix}failed"] = metrics.get(f"{prefix}failed", 0.0) + each.failed
        metrics[f"{prefix}score@{each.temperature:g}"] = each.score
        metrics[f"{prefix}reward@{each.temperature:g}"] = each.reward
        for k, share in each.pass_at.items():
            metrics[f"{prefix}pass{k}@{each.temperature:g}"] = share
    return metrics
