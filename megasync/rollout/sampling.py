"""Sampling parameters as they go over the wire: always all of them.

A parameter that is left out would take the server's default, or the model's, and the trainer would not know.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from megasync.config.schema import SamplingConfig
from megasync.errors import DataError

# Sent with every request, besides what `SamplingConfig` has.
_NEUTRAL = {
    "min_p": 0.0,
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


# With another value tokens are sampled from another distribution than the trainer scores: a part of it, or one that is
# bent by what was sampled before or, as the end of a response is ruled out, by its length.
_TRAINED = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


def base_params(sampling: SamplingConfig) -> dict[str, Any]:
    """Every parameter with its value; `stop` is a copy."""
    return _NEUTRAL | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
    }


def merge_params(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A new dictionary; raises DataError for a name that is no sampling parameter or a value out of range."""
    for name in overrides:
        if name not in base:
            near = get_close_matches(name, base, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(base))}"
            raise DataError(f"{name!r} is not a sampling parameter{hint}")
    params = base | overrides
    # SGLang takes a single text too.
    params["stop"] = [params["stop"]] if isinstance(params["stop"], str) else list(params["stop"] or ())
    if "" in params["stop"]:
        raise DataError("stop holds an empty text, which would end every response at once; drop it")
    if not params["temperature"] >= 0:
        raise DataError(f"temperature must be 0 (greedy) or more, not {params['temperature']!r}")
    if not 0 < params["top_p"] <= 1:
        raise DataError(f"top_p must be in (0, 1], not {params['top_p']!r}")
    if params["top_k"] != -1 and params["top_k"] < 1:
        raise DataError(f"top_k must be -1 (all) or at least 1, not {params['top_k']!r}")
    if params["max_new_tokens"] < 1:
        raise DataError(f"max_new_tokens must be at least 1, not {params['max_new_tokens']!r}")
    return params


def check_trained(params: dict[str, Any], temperature: float) -> None:
    """Raises DataError where a response would be sampled otherwise than the trainer scores it."""
    for name, value in (_TRAINED | {"temperature": temperature}).items():
        if params[name] != value:
            why = "rollout.sampling.temperature" if name == "temperature" else "the full distribution"
            raise DataError(
                f"{name}={params[name]!r} cannot be asked for in a training rollout: the trainer scores tokens at {why}, "
                f"which is {name}={value!r}. Leave {name} out; evaluation may sample otherwise (eval.sampling)"
            )
