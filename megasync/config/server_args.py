"""Limits of the SGLang arguments that a configuration adds to a server: other keys control some, and some do harm."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from megasync.config.limits import Checked


def _by_flag(flags: Mapping[str | None, str]) -> dict[str, str | None]:
    return {flag: key for key, words in flags.items() for flag in words.split()}


# By flag: the key that sets the value instead (after a dot, of the servers' section); None if megasync must choose it.
RESERVED = _by_flag(
    {
        ".tensor_parallel": "--tp --tp-size --tensor-parallel-size",
        ".context_length": "--context-length",
        ".max_total_tokens": "--max-total-tokens",
        ".max_running_requests": "--max-running-requests",
        ".mem_fraction": "--mem-fraction-static",
        "seed": "--random-seed",
        # A server is one group of tensor-parallel ranks on the GPUs of its slot, or several of pipeline stages.
        ".servers": "--dp-size --data-parallel-size",
        "cluster.device": "--device",
        "cluster.host": "--host",
        "cluster.generation_key": "--api-key",
        None: (
            "--nnodes --node-rank --base-gpu-id --gpu-id-step --port --weight-version --admin-api-key "
            # Reads keys, or any other argument, from a user's file.
            "--config "
            # Additional workers and servers that the guard of the HTTP server would not protect.
            "--tokenizer-worker-num --grpc-port --grpc-mode --smg-grpc-mode --sidecar --encoder-only --use-ray"
        ),
    }
)
# Flags that make servers sample from another distribution than the trainer scores. The value is the only harmless one;
# None if there is none.
_DISTRIBUTION: dict[str, float | None] = {
    "--preferred-sampling-params": None,
    "--speculative-accept-threshold-single": 1.0,
    "--speculative-accept-threshold-acc": 1.0,
    "--enable-watermark": None,
    "--watermark-config": None,
}
# Computes logits in float32 from a model in bfloat16.
FLOAT32_HEAD = "--enable-fp32-lm-head"
OF_ROLLOUT = _by_flag(
    {
        "rollout.attention_data_parallel": "--attn-dp-size --enable-dp-attention",
        "rollout.pipeline_parallel": "--pp --pp-size --pipeline-parallel-size",
        "rollout.expert_parallel": "--ep --ep-size --expert-parallel-size",
        "model.path": "--model-path --model",
        "model.dtype": "--dtype",
        "rollout.deterministic": "--enable-deterministic-inference",
        "rollout.stream_interval": "--stream-interval --incremental-streaming-output",
        "rollout.routing_replay": "--enable-return-routed-experts",
        "rollout.prefill_engines": "--disaggregation-mode",
        None: (
            # All groups must take a pause or an update between the same two batches.
            "--enable-dp-attention-local-control-broadcast "
            "--disaggregation-transfer-backend --disaggregation-bootstrap-port"
        ),
    }
)
OF_FROZEN_MODELS = _by_flag(
    {
        ".tensor_parallel": "--pp --pp-size --pipeline-parallel-size",
        ".path": "--model-path --model",
        ".dtype": "--dtype",
        ".kind": "--is-embedding",
        # Nothing would send it requests together with a server of the other kind.
        None: "--disaggregation-mode",
    }
)
# Flags that quantize weights as the server starts; the weights of a sync would not fit them afterwards.
_QUANTIZING = ("--quantization", "--torchao-config")
# Values that replace those of a config.json.
OVERRIDES = "--json-model-override-args"


def serves_float32_head(arguments: Mapping[str, Any]) -> bool:
    """Whether servers compute logits in float32."""
    return any(name.partition("=")[0] == FLOAT32_HEAD and value is not False for name, value in arguments.items())


def _refused(arguments: Mapping[str, Any], reserved: Mapping[str, str | None]) -> Iterator[str]:
    """Yields what is wrong with the arguments, whatever the server is for."""
    flags = {*reserved, *_DISTRIBUTION, *_QUANTIZING, OVERRIDES}
    for argument in arguments:
        # The flag may also be written as --flag=value.
        name = argument.partition("=")[0]
        if not argument.startswith("--"):
            yield f"has {argument!r}, which must be a server flag such as --chunked-prefill-size"
        elif name not in flags and (flag := min((each for each in flags if each.startswith(name)), default=None)):
            # SGLang would take it for that flag, past the checks of the whole name.
            yield f"must not contain {argument}: it abbreviates {flag}; write it out"
        elif name in reserved:
            instead = reserved[name]
            fix = f"set {instead.lstrip('.')} instead" if instead else "megasync chooses it for every server; drop it"
            yield f"must not contain {argument}: {fix}"


def _harmful(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields arguments that would quantize the policy, or have servers sample from another distribution."""
    for argument, value in arguments.items():
        overrides: Any = {}
        if argument == OVERRIDES:
            try:
                overrides = json.loads(value) if isinstance(value, str) else None
            except ValueError:
                overrides = None
            if not isinstance(overrides, dict):
                yield f"{argument}={value!r} must be a text with one JSON object, such as '{{\"rope_theta\": 10000}}'"
                continue
        quantizes = argument.partition("=")[0] in _QUANTIZING and value != "unquant"
        if quantizes or "quantization_config" in overrides:
            yield f"{argument}={value!r} would quantize the policy, but syncs send weights in model.dtype; drop it"
        if argument in _DISTRIBUTION:
            harmless = _DISTRIBUTION[argument]
            if harmless is None or str(value) not in (str(harmless), f"{harmless:g}"):
                yield (
                    f"{argument}={value!r} would sample training rollouts from another distribution than the trainer "
                    f"scores (rollout.sampling); {'' if harmless is None else f'set it to {harmless:g}, or '}drop it"
                )


FROZEN_FLAGS = Checked(lambda arguments: next(_refused(arguments, RESERVED | OF_FROZEN_MODELS), None))
ROLLOUT_FLAGS = Checked(
    lambda arguments: next(chain(_refused(arguments, RESERVED | OF_ROLLOUT), _harmful(arguments)), None)
)
