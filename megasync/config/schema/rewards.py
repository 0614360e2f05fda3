"""How responses are scored, and which of them are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from megasync.config.limits import (
    AT_LEAST_ONE,
    DTYPE,
    FINITE,
    JUDGED,
    NOT_NEGATIVE,
    PATH,
    PATTERN,
    POSITIVE,
    PROPER_FRACTION,
    Choice,
)
from megasync.config.rules import above, at_most, below, excludes, key, needs, unused_without, when
from megasync.config.server_args import FROZEN_FLAGS

_SHARED = "with pool=rollout, server n shares the devices of rollout server n"
# Keys of reward models that write a number, or answer yes or no.
OF_NUMBER = (unused_without(".kind", "generative"), unused_without(".read", "number"))
OF_YES_NO = (unused_without(".kind", "generative"), unused_without(".read", "yes_no"))


@dataclass
class RewardConfig:
    """One of several reward functions, under the name that it has in the metrics: docs/rewards.md."""

    # math, code, or `package.module:function`; null takes its name here. A class is instantiated with `options`.
    function: str | None = None
    # Weight in the sum, above 0. A reward of None is left out, and the remaining weights are scaled up to the full sum.
    weight: float = key(1.0, POSITIVE)
    # Arguments of the class that `function` names.
    options: dict[str, Any] = key(dict)
    # One of `reward_models`, instead of a function.
    model: str | None = key(
        None,
        excludes(".function", because="a reward comes from one of them"),
        excludes(".options", because="reward_models has the model's input"),
    )


@dataclass
class GroupConfig:
    """Which responses of a prompt, and which prompts, are trained: docs/groups.md."""

    # Drop groups whose rewards are all equal, before penalties (nothing to learn), and draw another prompt instead.
    drop_uniform: bool = key(
        False,
        needs("schedule.samples_per_group", above(1), because="it compares the rewards of a prompt's samples"),
        needs("algorithm.reward_coef", above(0), because="teachers alone are trained on, not rewards"),
    )
    # Responses sampled per prompt beyond `schedule.samples_per_group`.
    extra_samples: int = key(
        0,
        NOT_NEGATIVE,
        needs(
            ".keep",
            "spread",
            because="which responses finish first depends on timing, and rollout.deterministic=true excludes that",
            where={"rollout.deterministic": True},
        ),
    )
    # Which of the sampled responses are kept: first (those that finish first; the others are aborted) or spread (those
    # whose rewards have the largest variance).
    keep: str = key("first", Choice("first", "spread"), unused_without(".extra_samples", above(0)))
    # What to do with responses truncated at the length limit: keep, mask (exclude from loss and baseline) or punish
    # (reduce the reward of responses near the limit).
    overlong: str = key(
        "keep",
        Choice("keep", "mask", "punish"),
        when(
            "punish",
            needs(".overlong_tokens", above(0)),
            excludes(
                "algorithm.advantage",
                "gdpo",
                because="it normalises the scores of each reward function by itself, and the penalty is one of their "
                "sum; score the length in one of rollout.rewards",
                where={"algorithm.reward_coef": above(0)},
            ),
        ),
    )
    # punish: number of tokens before `rollout.sampling.max_new_tokens` over which the reward falls.
    overlong_tokens: int = key(
        0,
        NOT_NEGATIVE,
        unused_without(".overlong", "punish"),
        at_most("rollout.sampling.max_new_tokens", where={".overlong": "punish"}),
    )
    # punish: penalty at the limit.
    overlong_penalty: float = key(1.0, POSITIVE, unused_without(".overlong", "punish"))


@dataclass
class FrozenModelConfig:
    """A model that is served beside the policy and never trained: the keys that reward and auxiliary models share."""

    # Hugging Face folder (config.json, safetensors, tokenizer), or a model's name on a hub: docs/models.md.
    path: str = key(MISSING, PATH)
    # float32 or bfloat16; null takes `model.dtype`.
    dtype: str | None = key(None, DTYPE)
    # own (a separate pool) or rollout (server n shares the devices of rollout server n).
    pool: str = key(
        "own",
        Choice("own", "rollout"),
        excludes("rollout.external", because="it takes devices of servers that the run starts"),
        excludes("server's number of nodes", above(1), because="it takes devices of a rollout server on one node"),
        excludes("cluster.colocate", because="it would keep its memory", training=True),
    )
    # Number of SGLang servers.
    servers: int = key(1, AT_LEAST_ONE, at_most("rollout.servers", because=_SHARED, where={".pool": "rollout"}))
    # Tensor-parallel ranks (GPUs) of each server.
    tensor_parallel: int = key(
        1,
        AT_LEAST_ONE,
        at_most("rollout.tensor_parallel", because=_SHARED, where={".pool": "rollout"}),
        at_most("cluster.devices_per_node", because="a server is on one node"),
    )
    # Fraction of a device's memory for weights and KV cache. With pool=rollout this, `rollout.mem_fraction` and those
    # of other models there must sum to less than 1.
    mem_fraction: float = key(0.8, PROPER_FRACTION)
    # Maximum length of the text and its answer, in tokens; null takes the model's own limit. A reward model gives no
    # score for a longer text, a teacher no log-probs, and an auxiliary model refuses it.
    context_length: int | None = key(None, AT_LEAST_ONE)
    # KV cache per server in tokens. null leaves it to SGLang; on a CPU it is one GiB, or what one sequence of
    # `context_length` (else of the longest prompt, response and answer) takes.
    max_total_tokens: int | None = key(None, AT_LEAST_ONE)
    # Maximum number of running requests per server. null leaves it to SGLang; on a CPU it is `max_inflight`.
    max_running_requests: int | None = key(None, AT_LEAST_ONE)
    # Additional SGLang command line arguments.
    server_args: dict[str, Any] = key(dict, FROZEN_FLAGS)
    # Maximum number of concurrent requests; others are queued.
    max_inflight: int = key(64, AT_LEAST_ONE)


@dataclass
class AuxiliaryModelConfig(FrozenModelConfig):
    """A model on its own servers that workflows ask by name, such as a refiner: docs/workflows.md#auxiliary-models."""

    # Maximum length of an answer, in tokens, unless the workflow asks for another.
    max_new_tokens: int = key(256, AT_LEAST_ONE)
    # Sampling temperature, unless the workflow asks for another.
    temperature: float = key(0.0, NOT_NEGATIVE)


@dataclass
class TeacherConfig(FrozenModelConfig):
    """A model on its own servers whose log-probs of the policy's tokens are trained on: docs/teachers.md."""

    # What it teaches: values of the rows' column `data_source`, or else names of `data.sets`; empty for everything that
    # no other teacher does.
    sources: list[str] = key(list)


@dataclass
class RewardModelConfig(FrozenModelConfig):
    """A model on its own servers that scores responses (docs/reward_models.md). It is never trained."""

    # classifier (a sequence-classification or reward head) or generative (a judge that writes).
    kind: str = key(MISSING, Choice("classifier", "generative"))
    # chat: messages through the model's chat template. raw: plain text.
    format: str = key("chat", Choice("chat", "raw"))
    # chat: a system message.
    system: str = key("", needs(".format", "chat", because="it is a chat message; a raw input takes it in `template`"))
    # The model's input: a Python format string over the row's columns, with {completion}. null passes prompt and
    # response unchanged to a classifier, and asks a judge a default question.
    template: str | None = key(None, JUDGED)
    # classifier: index of the output that is the score.
    label: int = key(0, NOT_NEGATIVE, unused_without(".kind", "classifier"))
    # generative: number (the score that it writes) or yes_no (the probability of `yes_token` against `no_token`
    # as the next token).
    read: str = key("number", Choice("number", "yes_no"), unused_without(".kind", "generative"))
    # number: a regular expression whose last match, or its first group if it has one, is the number; null finds the
    # score as judges write it ("Score: 7", "8/10", [[7]], {"score": 7}).
    pattern: str | None = key(None, PATTERN, *OF_NUMBER)
    # number: lower end of the scale. The score is the number's position between low and high, from 0 to 1; a number
    # outside gives no score.
    low: float = key(0.0, FINITE, *OF_NUMBER, below(".high"))
    # number: upper end of the scale.
    high: float = key(10.0, FINITE, *OF_NUMBER)
    # number: maximum length of the judge's answer, in tokens.
    max_new_tokens: int = key(256, AT_LEAST_ONE, *OF_NUMBER)
    # number: sampling temperature of the judge.
    temperature: float = key(0.0, NOT_NEGATIVE, *OF_NUMBER)
    # yes_no: one token. Quote it: in YAML a bare Yes is true.
    yes_token: str = key("Yes", *OF_YES_NO)
    # yes_no: one token.
    no_token: str = key("No", *OF_YES_NO)
