"""Limits of the SGLang arguments that a configuration adds to a server: other keys control some, and some do harm."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from megasync.config.limits import Checked

# The key that sets the value instead (after a dot, of the servers' section); None if megasync must choose the value.
RESERVED: dict[str, str | None] = {
    "--tp": ".tensor_parallel",
    "--tp-size": ".tensor_parallel",
    "--tensor-parallel-size": ".tensor_parallel",
    "--context-length": ".context_length",
    "--max-total-tokens": ".max_total_tokens",
    "--max-running-requests": ".max_running_requests",
    "--mem-fraction-static": ".mem_fraction",
    "--random-seed": "seed",
    # A server is one group of tensor-parallel ranks on the GPUs of its slot, or several of pipeline stages.
    "--dp-size": ".servers",
    "--data-parallel-size": ".servers",
    "--nnodes": None,
    "--node-rank": None,
    "--base-gpu-id": None,
    "--gpu-id-step": None,
    "--device": "cluster.device",
    "--host": "cluster.host",
    "--port": None,
    "--weight-version": None,
    "--api-key": "cluster.generation_key",
    "--admin-api-key": None,
    # Reads keys, or any other argument, from a user's file.
    "--config": None,
    # Additional workers and servers that the guard of the HTTP server would not protect.
    "--tokenizer-worker-num": None,
    "--grpc-port": None,
    "--grpc-mode": None,
    "--smg-grpc-mode": None,
    "--sidecar": None,
    "--encoder-only": None,
    "--use-ray": None,
}
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
OF_ROLLOUT: dict[str, str | None] = {
    "--attn-dp-size": "rollout.attention_data_parallel",
    "--enable-dp-attention": "rollout.attention_data_parallel",
    # All groups must take a pause or an update between the same two batches.
    "--enable-dp-attention-local-control-broadcast": None,
    "--pp": "rollout.pipeline_parallel",
    "--pp-size": "rollout.pipeline_parallel",
    "--pipeline-parallel-size": "rollout.pipeline_parallel",
    "--ep": "rollout.expert_parallel",
    "--ep-size": "rollout.expert_parallel",
    "--expert-parallel-size": "rollout.expert_parallel",
    "--model-path": "model.path",
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--enable-deterministic-inference": "rollout.deterministic",
    "--stream-interval": "rollout.stream_interval",
    "--incremental-streaming-output": "rollout.stream_interval",
    "--enable-return-routed-experts": "rollout.routing_replay",
    "--disaggregation-mode": "rollout.prefill_engines",
    "--disaggregation-transfer-backend": None,
    "--disaggregation-bootstrap-port": None,
}
OF_FROZEN_MODELS: dict[str, str | None] = {
    "--pp": ".tensor_parallel",
    "--pp-size": ".tensor_parallel",
    "--pipeline-parallel-size": ".tensor_parallel",
    "--model-path": ".path",
    "--model": ".path",
    "--dtype": ".dtype",
    "--is-embedding": ".kind",
    # Nothing would send it requests together with a server of the other kind.
    "--disaggregation-mode": None,
}
# Flags that quantize weights as the server starts; the weights of a sync would not fit them afterwards.
_QUANTIZING = ("--quantization", "--torchao-config")
# Values that replace those of a config.json.
OVERRIDES = "--json-model-override-args"


def serves_float32_head(arguments: Mapping[str, Any]) -> bool:
    """Whether servers compute logits in float32."""
    return any(name.partition("=")[0] == FLOAT32_HEAD and value is not False for name, value in arguments.items())


def _refused(arguments: Mapping[str, Any], reserved: Mapping[str, str | None]) -> Iterator[str]:
    """What is wrong with the arguments of any server."""
    known = {*reserved, *_DISTRIBUTION, *_QUANTIZING, OVERRIDES}
    for argument in arguments:
        # The flag may also be written as --flag=value.
        name = argument.partition("=")[0]
        if not argument.startswith("--"):
            yield f"has {argument!r}, which must be a server flag such as --chunked-prefill-size"
        elif name not in known and (flag := min((each for each in known if each.startswith(name)), default=None)):
            # SGLang would take it for that flag, past the checks of the whole name.
            yield f"must not contain {argument}: it abbreviates {flag}; write it out"
        elif name in reserved:
            instead = reserved[name]
            fix = f"set {instead.lstrip('.')} instead" if instead else "megasync chooses it for every server; drop it"
            yield f"must not contain {argument}: {fix}"


def _harmful(arguments: Mapping[str, Any]) -> Iterator[str]:
    """What would quantize the policy, or make servers sample from another distribution."""
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
