"""Checks the SGLang arguments that a configuration adds to a server, and refuses those that other keys control."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megasync.errors import ConfigError

# The key that sets the value instead ({servers} is the servers' section); None if megasync must choose the value.
RESERVED: dict[str, str | None] = {
    "--tp": "{servers}.tensor_parallel",
    "--tp-size": "{servers}.tensor_parallel",
    "--tensor-parallel-size": "{servers}.tensor_parallel",
    "--context-length": "{servers}.context_length",
    "--max-total-tokens": "{servers}.max_total_tokens",
    "--max-running-requests": "{servers}.max_running_requests",
    "--mem-fraction-static": "{servers}.mem_fraction",
    "--random-seed": "seed",
    # A server is one group of tensor-parallel ranks on the GPUs of its slot, or several of pipeline stages.
    "--dp-size": "{servers}.servers",
    "--data-parallel-size": "{servers}.servers",
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
    "--pp": "{servers}.tensor_parallel",
    "--pp-size": "{servers}.tensor_parallel",
    "--pipeline-parallel-size": "{servers}.tensor_parallel",
    "--model-path": "{servers}.path",
    "--model": "{servers}.path",
    "--dtype": "{servers}.dtype",
    "--is-embedding": "{servers}.kind",
    # Nothing would send it requests together with a server of the other kind.
    "--disaggregation-mode": None,
}
# Flags that quantize weights as the server starts; the weights of a sync would not fit them afterwards.
_QUANTIZING = ("--quantization", "--torchao-config")
# Values that replace those of a config.json.
OVERRIDES = "--json-model-override-args"


def check_server_args(servers: str, arguments: Mapping[str, Any], own: Mapping[str, str | None]) -> None:
    """Raises ConfigError for an invalid or reserved flag. `servers` is the name of the section, such as "rollout"."""
    reserved = {**RESERVED, **own}
    known = {*reserved, *_DISTRIBUTION, *_QUANTIZING, OVERRIDES}
    for argument in arguments:
        if not argument.startswith("--"):
            raise ConfigError(
                f"{servers}.server_args key {argument!r} must be a server flag such as --chunked-prefill-size"
            )
        # The flag may also be written as --flag=value.
        name = argument.partition("=")[0]
        if name not in known and (whole := min((flag for flag in known if flag.startswith(name)), default=None)):
            # SGLang would take it for that flag, past the checks of the whole name.
            raise ConfigError(f"{servers}.server_args must not contain {argument}: it abbreviates {whole}")
        if name in reserved:
            key = reserved[name]
            fix = f"set {key.format(servers=servers)} instead" if key else "megasync chooses it for every server"
            raise ConfigError(f"{servers}.server_args must not contain {argument}: {fix}")


def check_trained_args(servers: str, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for a flag that quantizes the policy, or makes servers sample from another distribution."""
    for argument, value in arguments.items():
        given = f"{servers}.server_args {argument}={value!r}"
        overrides: Any = {}
        if argument == OVERRIDES:
            try:
                overrides = json.loads(value) if isinstance(value, str) else None
            except ValueError:
                overrides = None
            if not isinstance(overrides, dict):
                raise ConfigError(f"{given} must be a text with one JSON object, such as '{{\"rope_theta\": 10000}}'")
        quantizes = argument.partition("=")[0] in _QUANTIZING and value != "unquant"
        if quantizes or "quantization_config" in overrides:
            raise ConfigError(
                f"{given} would quantize the policy, but weight syncs send weights in model.dtype; drop it"
            )
    for argument in _DISTRIBUTION.keys() & arguments.keys():
        harmless = _DISTRIBUTION[argument]
        if harmless is None or str(arguments[argument]) not in (str(harmless), f"{harmless:g}"):
            fix = "drop it" if harmless is None else f"set it to {harmless:g} or drop it"
            raise ConfigError(
                f"{servers}.server_args {argument}={arguments[argument]!r} would sample training rollouts from another "
                f"distribution than the trainer scores (rollout.sampling); {fix}"
            )


def check_head(in_float32: bool, dtype: str, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError if only one of trainer and servers computes logits in float32: their log-probs would differ.

    ``in_float32`` is `trainer.float32_head`. In a model that is in float32 both do.
    """
    served = any(name.partition("=")[0] == FLOAT32_HEAD and value is not False for name, value in arguments.items())
    if dtype == "float32" or served == in_float32:
        return
    shown = json.dumps({FLOAT32_HEAD: True})
    if in_float32:
        raise ConfigError(
            f"trainer.float32_head=true computes logits in float32, but servers compute them in model.dtype={dtype}, "
            f"which adds a gap to every log-prob; set rollout.server_args={shown}, or float32_head=false"
        )
    raise ConfigError(
        f"rollout.server_args {FLOAT32_HEAD} computes logits in float32, but trainer.float32_head=false computes them "
        f"in model.dtype={dtype}, which adds a gap to every log-prob; set float32_head=true, or drop the flag"
    )
