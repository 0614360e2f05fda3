"""The section of one reward model; a part of `schema`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class RewardModelConfig:
    """A model on servers of its own that scores responses. Weight syncs never touch it."""

    # classifier (a sequence-classification or reward head; one number a response) or generative (a judge that writes).
    kind: str = MISSING
    # Hugging Face folder: config.json, safetensors, tokenizer.
    path: str = MISSING
    # float32 or bfloat16; null takes model.dtype.
    dtype: str | None = None
    # Where its servers run: own (a pool of their own) or rollout (on the devices of the rollout servers, one beside each
    # of the first `servers` of them).
    pool: str = "own"
    servers: int = 1
    tensor_parallel: int = 1
    # Share of a device's memory for weights and KV cache; with pool=rollout this, rollout.mem_fraction and those of other
    # models there must sum to less than 1.
    mem_fraction: float = 0.8
    # As for the rollout servers.
    context_length: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    server_args: dict[str, Any] = field(default_factory=dict)
    # Responses being scored at once; more wait for their turn.
    max_inflight: int = 64
    # chat: as messages through its tokenizer's chat template. raw: as plain text.
    format: str = "chat"
    system: str = ""
    # What it reads: a Python format string over the row's columns, with {completion}. null gives a classifier prompt and
    # response as they are, and a judge a ready question.
    template: str | None = None
    # classifier: which of its outputs is the score.
    label: int = 0
    # generative: number (the last number that it writes) or yes_no (how likely `yes_token` is against
    # `no_token` as its next token).
    read: str = "number"
    # number: a regular expression whose last match is the number, its first group where it has one. A number outside
    # `low` to `high` counts as none; within, it is scaled to 0 to 1.
    pattern: str = r"-?\d+(?:\.\d+)?"
    low: float = 0.0
    high: float = 10.0
    max_new_tokens: int = 256
    temperature: float = 0.0
    # yes_no: one token each. In quotes: to YAML a bare Yes is true.
    yes_token: str = "Yes"
    no_token: str = "No"
