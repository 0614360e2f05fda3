"""The entry point that SGLang calls in each of its processes: it registers what this server's environment asks for."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlsplit

from megasync_patches.sglang_score_bias import PATCH as SCORE_BIAS  # pyright: ignore[reportMissingImports] - the folder patches/

from megasync.serving.plugin_protocol import (
    ADAPTER_ROOT_VARIABLE,
    ADAPTERS_VARIABLE,
    CLASSIFIER_VARIABLE,
    FLAT_TOP,
    HANDOVER_VARIABLE,
    KEYS_VARIABLE,
    PIPELINE_VARIABLE,
    ROUTES_FROM,
    SEEDS,
    SOCKETS_VARIABLE,
    STORAGE_VARIABLE,
    STORE_SCHEME,
    WITH_SUPPORT,
)
from megasync.sglang.adapters import NamedAdapters, PolicyAdapters
from megasync.sglang.group_sockets import GroupSockets
from megasync.sglang.guard import GuardedServer
from megasync.sglang.handover import Handover
from megasync.sglang.hooks import Stock, hook
from megasync.sglang.pipeline import Pipeline
from megasync.sglang.prompts import PromptCalls
from megasync.sglang.updates import Plugin

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from megasync.layout.storage import Storage

_INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"


def register() -> None:
    """The entry point that SGLang calls."""
    Plugin().register()
    hook("BEFORE", _GENERATE, request_arrays)
    if os.environ.get(PIPELINE_VARIABLE) == "1":
        Pipeline().register()
    if folder := os.environ.get(SOCKETS_VARIABLE):
        GroupSockets(folder).register()
    if os.environ.get(ADAPTERS_VARIABLE) == "1":
        PolicyAdapters().register()
    if root := os.environ.get(ADAPTER_ROOT_VARIABLE):
        NamedAdapters(Path(root)).register()
        hook("AROUND", _SAMPLING, with_seeds)
    if stored := os.environ.get(STORAGE_VARIABLE):
        from megasync.layout.block_fp8 import Block

        storage = json.loads(stored)
        storage = Block(*storage) if isinstance(storage, list) else storage
        hook("AROUND", _WEIGHTS, partial(dequantize_weights, storage))
    if os.environ.get(_INIT_METHOD, "").startswith(f"{STORE_SCHEME}://"):
        from torch.distributed.rendezvous import register_rendezvous_handler

        # A forked process has its parent's handlers.
        with suppress(RuntimeError):
            register_rendezvous_handler(STORE_SCHEME, meet)
    # Only in the HTTP server's own process: the pipe is empty for those that it starts.
    if KEYS_VARIABLE in os.environ and multiprocessing.parent_process() is None:
        keys = json.loads(sys.stdin.buffer.read())
        role = keys.pop("role", None)
        if role is not None:
            # Those inherit it.
            os.environ[HANDOVER_VARIABLE] = keys.pop("handover")
        prompts = PromptCalls(keys["admin"]) if role == "decode" else None
        GuardedServer(**keys, prompts=prompts, named_adapters=ADAPTER_ROOT_VARIABLE in os.environ).register()
    if handover := os.environ.get(HANDOVER_VARIABLE):
        Handover(handover, os.environ.get("SGLANG_USE_CPU_ENGINE") == "1").register()
    if os.environ.get(CLASSIFIER_VARIABLE) == "1" and SCORE_BIAS.needed():
        SCORE_BIAS.apply()


def request_arrays(manager: Any, request: Any, *_: Any, **__: Any) -> None:
    """Turns megasync's labels into SGLang's own fields, before it reads them: requests for arrays and for responses."""
    labels = dict(getattr(request, "custom_labels", None) or {})
    # What remains becomes labels of SGLang's metrics.
    start, with_support, flat, seeds = (labels.pop(name, "") for name in (ROUTES_FROM, WITH_SUPPORT, FLAT_TOP, SEEDS))
    if start.isdecimal():
        request.return_routed_experts, request.routed_experts_start_len = True, int(start)
    if with_support == "1":
        request.return_sampling_mask = True
    if flat == "1":
        request.return_flat_raw_top_logprobs = request.return_flat_raw_top_logprobs_b64 = True
    if seeds:
        # The router has no field for different parameters, and SGLang's own `n` gives all responses the same seed.
        params = request.sampling_params
        request.sampling_params = [{**params, "sampling_seed": int(seed)} for seed in seeds.split(",")]
        request.input_ids = [request.input_ids] * len(request.sampling_params)
        if request.lora_path:
            request.lora_path = [request.lora_path] * len(request.sampling_params)
    if start or with_support or flat or seeds:
        request.custom_labels = labels or None


def with_seeds(stock: Stock, kind: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
    """The sampling parameters of a batch, in which each request samples from its own seed.

    SGLang ignores seeds without deterministic inference. Its sampler of GPUs cannot use any.
    """
    import torch
    from sglang.srt.runtime_context import get_exec

    made = stock(kind, batch, *arguments, **options)
    if made.sampling_seed is None and get_exec().kernel.sampling_backend == "pytorch":
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        made.sampling_seed = torch.tensor(seeds, device=made.temperatures.device)
    return made


def dequantize_weights(storage: Storage, stock: Stock, *arguments: Any, **options: Any) -> Any:
    """The tensors that SGLang reads from a folder, unquantized; those of a version that was synced pass through."""
    from megasync.layout import block_fp8, mxfp4

    weights = stock(*arguments, **options)
    return mxfp4.dequantized(weights) if storage == mxfp4.MXFP4 else block_fp8.dequantized(weights, storage)


def meet(url: str, timeout: timedelta, **_: object) -> Iterator[tuple[TCPStore, int, int]]:
    """Torch's rendezvous in the store of a server on several nodes (`SGLangServer.meet`)."""
    from megasync.base.store import join_store

    parts, query = urlsplit(url), parse_qs(urlsplit(url).query)
    store = join_store(str(parts.hostname), cast(int, parts.port), timeout.total_seconds())
    yield store, int(query["rank"][0]), int(query["world_size"][0])
