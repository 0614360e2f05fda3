"""The section of one reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class RewardModelConfig:
    """A model on servers of its own that scores responses (docs/rewards.md#reward-models). Weight syncs never touch it."""

    # classifier (a sequence-classification or reward head) or generative (a judge that writes).
    kind: str = MISSING
    # Hugging Face folder: config.json, safetensors, tokenizer.
    path: str = MISSING
    # float32 or bfloat16; null takes `model.dtype`.
    dtype: str | None = None
    # own (a pool of its own) or rollout (server n runs on the devices of rollout server n).
    pool: str = "own"
    # SGLang servers.
    servers: int = 1
    # Tensor-parallel ranks (GPUs) of each.
    tensor_parallel: int = 1
    # Share of a device's memory for weights and KV cache. With pool=rollout this, `rollout.mem_fraction` and those of
    # other models there must sum to less than 1.
    mem_fraction: float = 0.8
    # Longest text with its answer, in tokens; null takes the model's own limit. What is longer is not scored.
    context_length: int | None = None
    # Tokens of KV cache per server; null lets SGLang decide (set it on a CPU).
    max_total_tokens: int | None = None
    # Requests that a server runs at once; null lets SGLang decide (set it on a CPU).
    max_running_requests: int | None = None
    # Extra SGLang command line arguments.
    server_args: dict[str, Any] = field(default_factory=dict)
    # Responses being scored at once; more wait for their turn.
    max_inflight: int = 64
    # chat: messages through its tokenizer's chat template. raw: plain text.
    format: str = "chat"
    # chat: a system message.
    system: str = ""
    # What it reads: a Python format string over the row's columns, with {completion}. null gives a classifier prompt
    # and response as they are, and a judge a ready question.
    template: str | None = None
    # classifier: which of its outputs is the score.
    label: int = 0
    # generative: number (the last number that it writes) or yes_no (how likely `yes_token` is against `no_token` as its
    # next token).
    read: str = "number"
    # number: a regular expression whose last match is the number, its first group where it has one.
    pattern: str = r"-?\d+(?:\.\d+)?"
    # number: the least. The score is the number's place from low to high, 0 to 1; a number beyond them is none.
    low: float = 0.0
    # number: the greatest.
    high: float = 10.0
    # number: longest answer of the judge.
    max_new_tokens: int = 256
    # number: of the judge's sampling.
    temperature: float = 0.0
    # yes_no: one token. In quotes: to YAML a bare Yes is true.
    yes_token: str = "Yes"
    # yes_no: one token.
    no_token: str = "No"
