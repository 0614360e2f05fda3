"""Compares an engine's real weight loader with a replay of its trace, on tensors whose elements are all distinct.

On the PYTHONPATH of an SGLang server this folder provides two plugins, so that megasync's own plugin needs no test
hooks. ``SGLANG_PLUGINS`` selects:

- ``engine_oracle``: ``/weights_checker`` answers the action `ACTION` for each rank. The weights are invalid afterwards.
- ``engine_puppet``, instead of megasync's: a receiver that loads a commit's weights from a folder, or fails on request.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import nn

from megasync.layout.engine_layout import EngineRank
from megasync.layout.load_trace import refresh_derived, trace_load
from megasync.sglang.updates import Plugin, ServingRank

log = logging.getLogger(__name__)

ACTION = "oracle"
UNTOUCHED = -7.0


def painted(specs) -> dict[str, torch.Tensor]:
    """Float32 tensors with consecutive numbers, distinct across all tensors; exact up to 2**24 elements in total."""
    tensors, first = {}, 1
    for name, shape in specs:
        tensors[name] = torch.arange(first, first + math.prod(shape), dtype=torch.float32).reshape(shape)
        first += math.prod(shape)
    assert first <= 2**24
    return tensors


def replay(rank: EngineRank, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Writes what the trace describes, fills first."""
    held = state(model)
    for fill in rank.fills:
        place(held[fill.param], fill.offset, fill[2:6]).fill_(fill.value)
    for slot in rank.slots:
        tensor, box = tensors[slot.hf_name], slot.hf_box
        matrix = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
        part = matrix[box.row : box.row + box.rows, box.col : box.col + box.cols]
        place(held[slot.param], slot.offset, (box.rows, box.cols, slot.row_stride, slot.col_stride)).copy_(part)


def place(held: torch.Tensor, offset: int, shape_and_strides) -> torch.Tensor:
    rows, cols, row_stride, col_stride = shape_and_strides
    return held.as_strided((rows, cols), (row_stride, col_stride), held.storage_offset() + offset)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and tensors that are plain attributes: values a model derives from its parameters."""
    held = {name: tensor.data for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        held |= {f"{path}.{name} (derived)": v for name, v in vars(module).items() if isinstance(v, torch.Tensor)}
    return held


def compare(model: nn.Module, specs, rank: EngineRank, post_load=lambda model: None) -> dict[str, Any]:
    """Names of tensors that differ between a real load and a replay, and the number of compared elements."""

    buffers = {name for name, tensor in model.named_buffers() if tensor.is_floating_point()}

    def after(load) -> dict[str, torch.Tensor]:
        for name, tensor in state(model).items():
            if name in rank.sizes or name in buffers or name.endswith("(derived)"):
                tensor.fill_(UNTOUCHED)
        load()
        return {name: tensor.clone() for name, tensor in state(model).items()}

    def replayed() -> None:
        replay(rank, painted(specs), model)
        post_load(model)
        refresh_derived(model)

    with torch.no_grad():
        real = after(lambda: model.load_weights(iter(painted(specs).items())))
        ours = after(replayed)
    return {
        "different": [name for name in real if not torch.equal(real[name], ours[name])],
        "loaded": sum(int((real[name] > 0).sum()) for name in rank.sizes),
        "filled": sum(int((real[name] == 0).sum()) for name in rank.sizes),
        "derived": [name for name in real if name.endswith("(derived)")],
    }


def around_check(stock, checker, action, allow_quant_error=False, skip_tensor_list=None, *, role):
    if action != ACTION:
        return stock(checker, action, allow_quant_error, skip_tensor_list, role=role)
    from sglang.srt.model_loader.loader import post_load_weights

    asked = json.loads(skip_tensor_list[0])
    rank = msgspec.convert(asked["ranks"][checker._placement["tp_rank"]], EngineRank)
    try:
        answer = compare(checker._get_model(), asked["specs"], rank, post_load_weights)
    except Exception as error:
        # If this rank raised, the others would wait for its answer.
        log.exception("the oracle failed")
        answer = {"different": [repr(error)]}
    return {
        "checksums": {ACTION: json.dumps(answer)},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


class Puppet:
    """Commits the checkpoint ``model``; `check` fails on rank ``fail_check``, `commit` on rank ``fail_commit``."""

    def __init__(self, rank: ServingRank) -> None:
        self.rank = rank

    def handle(self, command: str, payload: dict[str, Any]) -> dict[str, Any]:
        return {"command": command, "payload": payload, "rank": self.rank.rank}

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("fail_check") == self.rank.rank:
            raise ValueError("nothing is staged here")
        return request

    def commit(self, request: dict[str, Any]) -> None:
        if request.get("fail_commit") == self.rank.rank:
            raise ValueError("the copy broke")
        tensors, model = load_file(request["model"]), self.rank.model
        replay(trace_load(model, [(name, tensor.shape) for name, tensor in tensors.items()]), tensors, model)


def register_puppet() -> None:
    Plugin(Puppet).register()


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", around_check, HookType.AROUND)
