"""The run's held-out evaluation: every configured temperature, the metrics, and the answers people look at."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from megasync.buffer.trajectory import Prompt
from megasync.config.schema import EvalConfig
from megasync.rewards import RewardRunner
from megasync.rollout.evaluate import Answer, evaluate
from megasync.rollout.workflow import Workflow

# (training step, weight version, answers at the first temperature)
AnswersSink = Callable[[int, int, Sequence[Answer]], None]


class HeldOut:
    """Called as `await held_out(step, version)`; the score is that of the first temperature."""

    def __init__(
        self,
        config: EvalConfig,
        client: Any,
        prompts: Sequence[Prompt],
        workflow: Workflow,
        rewards: RewardRunner,
        on_answers: AnswersSink,
        seed: int | None,
    ) -> None:
        self._config = config
        self._client = client
        self._prompts = prompts
        self._workflow = workflow
        self._rewards = rewards
        self._on_answers = on_answers
        self._seed = seed

    async def __call__(self, step: int, version: int) -> dict[str, float]:
        """Metrics: `eval/score` and `eval/failed`, and per temperature t `eval/score@t` and `eval/reward@t`."""
        start = time.monotonic()
        metrics: dict[str, float] = {"eval/failed": 0.0}
        for temperature in self._config.temperatures:
            found = await evaluate(
                self._client,
                self._prompts,
                self._workflow,
                self._rewards,
                temperature,
                self._config.samples,
                self._config.max_inflight,
                self._seed,
            )
            if "eval/score" not in metrics:
                metrics["eval/score"] = found.score
                self._on_answers(step, version, found.answers)
            metrics[f"eval/score@{temperature:g}"] = found.score
            metrics[f"eval/reward@{temperature:g}"] = found.reward
            metrics["eval/failed"] += found.failed
        return metrics | {"eval/seconds": time.monotonic() - start}
