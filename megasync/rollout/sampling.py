"""Sampling parameters of a request. Every request sends all of them.

An omitted parameter would take the default of the server or the model, which the trainer does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from megasync.config.schema import SamplingConfig
from megasync.errors import DataError

# Sent with every request, in addition to the parameters of `SamplingConfig`.
_NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "stop_token_ids": [],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
}


# Any other value changes the sampling distribution, so that it is no longer the one that the trainer scores. It depends
# on earlier tokens or, with a minimum length that rules out the end, on the response's length.
_TRAINED = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
# The trainer scores the distribution of these, at the configured values.
_CONFIGURED = ("temperature", "top_p", "top_k", "min_p")


def base_params(sampling: SamplingConfig) -> dict[str, Any]:
    """Return every sampling parameter with its value. `stop` is a copy."""
    return _NEUTRAL | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
    }


def merge_params(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge into a new dictionary. Raises DataError for an unknown parameter or a value out of range."""
    for name in overrides:
        if name not in base:
            near = get_close_matches(name, base, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(base))}"
            raise DataError(f"{name!r} is not a sampling parameter{hint}")
    params = base | overrides
    # SGLang also accepts a single string.
    params["stop"] = [params["stop"]] if isinstance(params["stop"], str) else list(params["stop"] or ())
    if "" in params["stop"]:
        raise DataError("stop contains an empty text, which would end every response immediately; remove it")
    if not params["temperature"] >= 0:
        raise DataError(f"temperature must be 0 (greedy) or more, not {params['temperature']!r}")
    if not 0 < params["top_p"] <= 1:
        raise DataError(f"top_p must be in (0, 1], not {params['top_p']!r}")
    if params["top_k"] != -1 and params["top_k"] < 1:
        raise DataError(f"top_k must be -1 (all) or at least 1, not {params['top_k']!r}")
    if not 0 <= params["min_p"] <= 1:
        raise DataError(f"min_p must be in [0, 1], not {params['min_p']!r}")
    if params["max_new_tokens"] < 1:
        raise DataError(f"max_new_tokens must be at least 1, not {params['max_new_tokens']!r}")
    return params


def truncates(params: Mapping[str, Any]) -> bool:
    """Whether some tokens are never sampled, so that the trainer needs to know which remain (`trajectory.support`)."""
    return params["top_k"] != -1 or params["top_p"] < 1 or params["min_p"] > 0


def check_trained(params: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Check the parameters of a training rollout, with those of the configuration as ``base``.

    Raises DataError if they would sample from another distribution than the trainer scores.
    """
    for name in (*_CONFIGURED, *_TRAINED):
        value = base[name]
        if params[name] != value:
            why = f"rollout.sampling.{name}" if name in _CONFIGURED else "the full distribution"
            raise DataError(
                f"{name}={params[name]!r} is not allowed in a training rollout: the trainer scores tokens at {why}, "
                f"which is {name}={value!r}. Leave {name} out; evaluation may use other values (eval.sampling)"
            )
