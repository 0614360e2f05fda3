"""The sections of evaluation and of held-out sets."""

from __future__ import annotations

from dataclasses import dataclass, field

from megasync.config.schema.data import DatasetConfig


@dataclass
class EvalSamplingConfig:
    """Where evaluation samples otherwise than training; null takes the value of `rollout.sampling`."""

    # Share of probability that is sampled from.
    top_p: float | None = None
    # Tokens that are sampled from; -1 for all.
    top_k: int | None = None
    # Longest answer.
    max_new_tokens: int | None = None


@dataclass
class EvalSetConfig:
    """A held-out set under a name of your choice (docs/evaluation.md). What is null is as in `eval`."""

    data: DatasetConfig = field(default_factory=DatasetConfig)
    # Prompts per evaluation.
    samples: int | None = None
    # One score per temperature; 0 is greedy.
    temperatures: list[float] | None = None
    # Answers to each prompt at temperatures above 0.
    repeats: int | None = None
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    # `math`, `code` or `package.module:function`; null takes the run's reward, or where it names none the set's
    # verifier.
    reward: str | None = None


@dataclass
class EvalConfig:
    """How held-out sets are answered: docs/evaluation.md."""

    # Training steps between evaluations; 0 evaluates only at the start and the end.
    every_steps: int = 10
    # Held-out prompts per evaluation.
    samples: int = 128
    # One score per temperature; 0 is greedy.
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    # Answers to each prompt at temperatures above 0, for pass@k.
    repeats: int = 1
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    # Answers under way at once, over all sets.
    max_inflight: int = 32
    # More held-out sets, by the names that they have in the metrics.
    sets: dict[str, EvalSetConfig] = field(default_factory=dict)
