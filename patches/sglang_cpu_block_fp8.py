"""Lets SGLang 0.5.23 serve block FP8 on CPUs without AMX: layers compute with dequantized weights.

SGLang's kernels for block FP8 need a GPU, or a CPU with AMX, for which it also rearranges the weights. With the patch
weights stay as they are loaded, as on a GPU, and each call of a layer dequantizes them. Activations are not quantized:
log-probs are those of the dequantized weights, which is more exact than on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megasync_patches import Patch


def _dequantized(layer: Any, name: str, block: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The weights ``name`` of a layer, [..., rows, columns]."""
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    return block_quant_dequant(getattr(layer, name), getattr(layer, name + "_scale_inv"), block, dtype)


def _apply_linear(method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    weight = _dequantized(layer, "weight", method.quant_config.weight_block_size, x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def _apply_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, block = dispatch_output.hidden_states, method.quant_config.weight_block_size
    weights = {name: _dequantized(layer, name, block, x.dtype) for name in ("w13_weight", "w2_weight")}
    plain = SimpleNamespace(num_experts=layer.num_experts, **weights)
    output = moe_forward_native(plain, x, dispatch_output.topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=output)


def _keep(method: Any, layer: Any) -> None:
    """In place of what SGLang does to loaded weights."""


def apply() -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

    for method, compute in ((Fp8LinearMethod, _apply_linear), (Fp8MoEMethod, _apply_experts)):
        method.process_weights_after_loading_block_quant = _keep
        method.apply = compute


PATCH = Patch(
    name="sglang_cpu_block_fp8",
    package="sglang",
    versions=("0.5.23",),
    reason="on a CPU without AMX SGLang has no kernel for block FP8",
    apply=apply,
)
