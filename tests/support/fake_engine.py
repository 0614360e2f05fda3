"""A miniature serving engine that fuses and shards a dense model's tensors as servers do. One module is one rank."""

from __future__ import annotations

import re

import torch
from torch import nn

from megasync.layout.engine_layout import EngineRank
from megasync.layout.families import sizes_of
from megasync.layout.load_trace import live_tensors, trace_load


class FakeEngineRank(nn.Module):
    def __init__(self, hf_config: dict, tp: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes = self.sizes = sizes_of(hf_config)
        self.tp, self.size = tp, size
        # With fewer key-value heads than ranks, the heads are replicated.
        self.kv_rows = max(sizes.groups // size, 1) * sizes.head_dim
        self.kv_row = tp * sizes.groups // size * sizes.head_dim
        self.q_rows = sizes.q_rows // size
        self.rows = -(-sizes.vocab // (8 * size)) * 8
        shapes = {"embed": (self.rows, sizes.hidden), "norm": (sizes.hidden,)}
        if not sizes.tied:
            shapes["head"] = (self.rows, sizes.hidden)
        for layer in range(sizes.layers):
            shapes |= {
                f"{layer}.input": (sizes.hidden,),
                f"{layer}.qkv": (self.q_rows + 2 * self.kv_rows, sizes.hidden),
                f"{layer}.o": (sizes.hidden, self.q_rows),
                f"{layer}.post": (sizes.hidden,),
                f"{layer}.gate_up": (2 * sizes.intermediate // size, sizes.hidden),
                f"{layer}.down": (sizes.hidden, sizes.intermediate // size),
            }
        self.names = list(shapes)
        self.held = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype), False) for shape in shapes.values())

    def load_weights(self, weights) -> None:
        params = dict(zip(self.names, self.held, strict=True))
        for name, tensor in weights:
            layer = re.search(r"layers\.(\d+)\.", name)
            self._load(params, layer and layer[1], name.removesuffix(".weight").rsplit(".", 1)[-1], tensor)

    def _load(self, params, layer, kind, tensor) -> None:
        sizes, tp = self.sizes, self.tp
        half = sizes.intermediate // self.size
        match kind:
            case "embed_tokens" | "lm_head":
                param = params["embed" if kind == "embed_tokens" else "head"]
                held = max(0, min(self.rows, sizes.vocab - tp * self.rows))
                param.data[:held].copy_(tensor[tp * self.rows : tp * self.rows + held])
                param.data[held:].zero_()
            case "norm":
                params["norm"].data.copy_(tensor)
            case "input_layernorm" | "post_attention_layernorm":
                params[f"{layer}.{'input' if kind[0] == 'i' else 'post'}"].data.copy_(tensor)
            case "q_proj":
                params[f"{layer}.qkv"].data[: self.q_rows].copy_(tensor.narrow(0, tp * self.q_rows, self.q_rows))
            case "k_proj" | "v_proj":
                start = self.q_rows + (self.kv_rows if kind[0] == "v" else 0)
                params[f"{layer}.qkv"].data[start : start + self.kv_rows].copy_(
                    tensor.narrow(0, self.kv_row, self.kv_rows)
                )
            case "o_proj":
                params[f"{layer}.o"].data.copy_(tensor.narrow(1, tp * self.q_rows, self.q_rows))
            case "gate_proj" | "up_proj":
                start = half if kind[0] == "u" else 0
                params[f"{layer}.gate_up"].data[start : start + half].copy_(tensor.narrow(0, tp * half, half))
            case "down_proj":
                params[f"{layer}.down"].data.copy_(tensor.narrow(1, tp * half, half))

    def tensors(self) -> dict[str, torch.Tensor]:
        return live_tensors(self)


def fake_engine(hf_config: dict, size: int, dtype: torch.dtype = torch.float32) -> list[FakeEngineRank]:
    return [FakeEngineRank(hf_config, tp, size, dtype) for tp in range(size)]


def traced(engine: list[FakeEngineRank], layout) -> list[EngineRank]:
    return [trace_load(rank, list(layout.hf_tensors.items())) for rank in engine]
