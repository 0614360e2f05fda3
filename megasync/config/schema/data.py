"""The section of the datasets and of how a row becomes a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class DatasetConfig:
    """A dataset. Both sections are null by default: rows may also come from Python, and `eval.sets` names held-out sets."""

    # digits (procedural), reasoning_gym, jsonl, parquet, or hf (a `datasets` folder or hub name).
    kind: str = MISSING
    # File or folder of jsonl, parquet and hf datasets; the task's name for digits and reasoning_gym.
    source: str = MISSING
    # Split of the dataset. The generated tasks have `train` and `test`, which share no row.
    split: str = "train"
    # Rows to generate (procedural kinds) or to keep (the others); null keeps all.
    size: int | None = None
    # Seed of generated rows.
    seed: int = 0
    # digits: length; reasoning_gym: the task's own options; hf: arguments of `datasets.load_dataset` (name, revision).
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class PromptConfig:
    """How a row becomes a prompt."""

    # raw: the template below, tokenised as plain text. chat: the tokenizer's chat template.
    format: str = "raw"
    # Python format string over the row's columns; the default is the row's prompt column itself.
    template: str = "{prompt}"
    # Text before the prompt: a system message (chat), or a preamble (raw).
    system: str = ""
    # Solved examples put before each raw prompt, drawn from the training set's first rows.
    examples: int = 0
    # How a solved example is written.
    example_template: str = "{prompt} {answer}\n\n"
    # Prompts longer than this are refused at start (counted and named), not cut.
    max_tokens: int = 1024


@dataclass
class DataConfig:
    """Where prompts come from."""

    train: DatasetConfig | None = None
    eval: DatasetConfig | None = None
    prompt: PromptConfig = field(default_factory=PromptConfig)
    # Draw the training prompts in a new order each epoch.
    shuffle: bool = True
