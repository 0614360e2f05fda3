"""How responses are scored, and which of them are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megasync.config.limits import AT_LEAST_ONE, DTYPE, NOT_NEGATIVE, PATH, POSITIVE, PROPER_FRACTION, Choice, limited


@dataclass
class RewardConfig:
    """One of several reward functions, under the name that it has in the metrics: docs/rewards.md."""

    # math, code, or `package.module:function`; null takes its name here. A class is instantiated with `options`.
    function: str | None = None
    # Weight in the sum, above 0. A reward of None is left out, and the remaining weights are scaled up to the full sum.
    weight: float = 1.0
    # Arguments of the class that `function` names.
    options: dict[str, Any] = field(default_factory=dict)
    # One of `reward_models`, instead of a function.
    model: str | None = None


@dataclass
class GroupConfig:
    """Which responses of a prompt, and which prompts, are trained: docs/rewards.md#from-responses-to-a-group."""

    # Drop groups whose rewards are all equal, before penalties (nothing to learn), and draw another prompt instead.
    drop_uniform: bool = False
    # Responses sampled per prompt beyond `schedule.samples_per_group`.
    extra_samples: int = limited(0, NOT_NEGATIVE)
    # Which of the sampled responses are kept: first (those that finish first; the others are aborted) or spread (those
    # whose rewards have the largest variance).
    keep: str = limited("first", Choice("first", "spread"))
    # What to do with responses truncated at the length limit: keep, mask (exclude from loss and baseline) or punish
    # (reduce the reward of responses near the limit).
    overlong: str = limited("keep", Choice("keep", "mask", "punish"))
    # punish: number of tokens before `rollout.sampling.max_new_tokens` over which the reward falls.
    overlong_tokens: int = limited(0, NOT_NEGATIVE)
    # punish: penalty at the limit.
    overlong_penalty: float = limited(1.0, POSITIVE)


@dataclass
class FrozenModelConfig:
    """A model that is served beside the policy and never trained: the keys that reward and auxiliary models share."""

    # Hugging Face folder: config.json, safetensors, tokenizer.
    path: str = limited(MISSING, PATH)
    # float32 or bfloat16; null takes `model.dtype`.
    dtype: str | None = limited(None, DTYPE)
    # own (a separate pool) or rollout (server n shares the devices of rollout server n).
    pool: str = limited("own", Choice("own", "rollout"))
    # Number of SGLang servers.
    servers: int = limited(1, AT_LEAST_ONE)
    # Tensor-parallel ranks (GPUs) of each server.
    tensor_parallel: int = limited(1, AT_LEAST_ONE)
    # Fraction of a device's memory for weights and KV cache. With pool=rollout this, `rollout.mem_fraction` and those
    # of other models there must sum to less than 1.
    mem_fraction: float = limited(0.8, PROPER_FRACTION)
    # Maximum length of the text and its answer, in tokens; null takes the model's own limit. A reward model gives no
    # score for a longer text, a teacher no log-probs, and an auxiliary model refuses it.
    context_length: int | None = limited(None, AT_LEAST_ONE)
    # KV cache per server in tokens. null leaves it to SGLang; on a CPU it is one GiB, or what one sequence of
    # `context_length` (else of the longest prompt, response and answer) takes.
    max_total_tokens: int | None = limited(None, AT_LEAST_ONE)
    # Maximum number of running requests per server. null leaves it to SGLang; on a CPU it is `max_inflight`.
    max_running_requests: int | None = limited(None, AT_LEAST_ONE)
    # Additional SGLang command line arguments.
    server_args: dict[str, Any] = field(default_factory=dict)
    # Maximum number of concurrent requests; others are queued.
    max_inflight: int = limited(64, AT_LEAST_ONE)


@dataclass
class AuxiliaryModelConfig(FrozenModelConfig):
    """A model on its own servers that workflows ask by name, such as a refiner: docs/workflows.md#auxiliary-models."""

    # Maximum length of an answer, in tokens, unless the workflow asks for another.
    max_new_tokens: int = limited(256, AT_LEAST_ONE)
    # Sampling temperature, unless the workflow asks for another.
    temperature: float = limited(0.0, NOT_NEGATIVE)


@dataclass
class TeacherConfig(FrozenModelConfig):
    """A model on its own servers whose log-probs of the policy's tokens are trained on: docs/algorithms.md#teachers."""

    # What it teaches: values of the rows' column `data_source`, or else names of `data.sets`; empty for everything that
    # no other teacher does.
    sources: list[str] = field(default_factory=list)


@dataclass
class RewardModelConfig(FrozenModelConfig):
    """A model on its own servers that scores responses (docs/rewards.md#reward-models). It is never trained."""

    # classifier (a sequence-classification or reward head) or generative (a judge that writes).
    kind: str = limited(MISSING, Choice("classifier", "generative"))
    # chat: messages through the model's chat template. raw: plain text.
    format: str = limited("chat", Choice("chat", "raw"))
    # chat: a system message.
    system: str = ""
    # The model's input: a Python format string over the row's columns, with {completion}. null passes prompt and
    # response unchanged to a classifier, and asks a judge a default question.
    template: str | None = None
    # classifier: index of the output that is the score.
    label: int = limited(0, NOT_NEGATIVE)
    # generative: number (the score that it writes) or yes_no (the probability of `yes_token` against `no_token`
    # as the next token).
    read: str = limited("number", Choice("number", "yes_no"))
    # number: a regular expression whose last match, or its first group if it has one, is the number; null finds the
    # score as judges write it ("Score: 7", "8/10", [[7]], {"score": 7}).
    pattern: str | None = None
    # number: lower end of the scale. The score is the number's position between low and high, from 0 to 1; a number
    # outside gives no score.
    low: float = 0.0
    # number: upper end of the scale.
    high: float = 10.0
    # number: maximum length of the judge's answer, in tokens.
    max_new_tokens: int = limited(256, AT_LEAST_ONE)
    # number: sampling temperature of the judge.
    temperature: float = limited(0.0, NOT_NEGATIVE)
    # yes_no: one token. Quote it: in YAML a bare Yes is true.
    yes_token: str = "Yes"
    # yes_no: one token.
    no_token: str = "No"
