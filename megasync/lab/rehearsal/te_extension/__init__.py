"""A stand-in, written in torch, for transformer_engine_torch, the compiled extension of Transformer Engine 2.20.

`transformer_engine.install` imports it under that name. It has the functions that Megatron's Transformer Engine layers
call in megasync's configurations, for CPU and meta tensors. Any other function can be imported and raises when called.
"""

from __future__ import annotations

from typing import Any

from megasync.lab.rehearsal.te_extension.attention import (
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    fused_attn_bwd,
    fused_attn_fwd,
    get_fused_attn_backend,
)
from megasync.lab.rehearsal.te_extension.context_parallel import (
    thd_copy_valid_tokens_from_per_split_to_rank_local,
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
    thd_sequence_order_to_cp_rank_order,
)
from megasync.lab.rehearsal.te_extension.enums import (
    CommOverlapType,
    DType,
    FP8BwdTensors,
    FP8FwdTensors,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
    NVTEQBHistogramMode,
    NVTERoutingMapFormat,
    NVTEScalingMode,
)
from megasync.lab.rehearsal.te_extension.fp8 import (
    bgrad_quantize,
    create_empty_quantized_tensor,
    dequantize,
    fp8_transpose,
    fused_amax_and_scale_update_after_reduction,
    fused_multi_row_padding,
    fused_multi_row_unpadding,
    quantize,
    split_quantize,
    swap_first_dims,
)
from megasync.lab.rehearsal.te_extension.gemm import generic_gemm, te_general_grouped_gemm
from megasync.lab.rehearsal.te_extension.norms import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd
from megasync.lab.rehearsal.te_extension.optimizer import (
    multi_tensor_adam,
    multi_tensor_adam_param_remainder,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)
from megasync.lab.rehearsal.te_extension.rope import fused_rope_backward, fused_rope_forward
from megasync.lab.rehearsal.te_extension.softmax import (
    scaled_aligned_causal_masked_softmax_backward,
    scaled_aligned_causal_masked_softmax_forward,
    scaled_masked_softmax_backward,
    scaled_masked_softmax_forward,
    scaled_softmax_backward,
    scaled_softmax_forward,
    scaled_upper_triang_masked_softmax_backward,
    scaled_upper_triang_masked_softmax_forward,
)
from megasync.lab.rehearsal.te_extension.user_buffers import (
    CommOverlap,
    CommOverlapHelper,
    CommOverlapP2P,
    device_supports_multicast,
    get_stream_priority_range,
    ubuf_built_with_mpi,
)


class FP8TensorMeta:
    """Scaling factors of delayed FP8 scaling: ``scale``, ``scale_inv`` and ``amax_history``, set by Python."""


def get_cublasLt_version() -> int:
    """13.1.1, as in launch/gpu.lock. From 13.4 on, grouped layers call another function, which has no stand-in."""
    return 130101


def get_cudnn_version() -> int:
    """9.24.0, as in launch/gpu.lock."""
    return 92400


def get_num_cublas_streams() -> int:
    return 4


def __getattr__(name: str) -> Any:
    """A name without a stand-in: a class to derive from or a function, either of which raises when called."""
    if name.startswith("__"):
        raise AttributeError(f"transformer_engine_torch has no attribute {name!r}")
    message = f"transformer_engine_torch.{name} was called, but it has no stand-in in lab/rehearsal/te_extension"

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(message)

    return type(name, (), {"__new__": refuse}) if name[0].isupper() else refuse
