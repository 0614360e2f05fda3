"""Transformer Engine's buffers for `trainer.tp_comm_overlap`, of which a process has one set.

They have the size of a microbatch, so all microbatches of all learners of the process must have that size. Layers look
their buffers up when they are built and in each pass: `open_buffers` comes before the first layer, and `close_buffers`
after the last pass.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MODULE = "transformer_engine.pytorch.module.base"


def open_buffers(tokens: int, hidden: int, ranks: int, dtype: torch.dtype, fp8: bool, backend: str) -> None:
    """Allocates the buffers [tokens, hidden] of ``ranks`` tensor-parallel ranks. A collective of all ranks.

    Does nothing if another learner of this process has done it. ``tokens`` are those of a microbatch on one
    context-parallel rank. With ``fp8``, what layers gather is in FP8. Over ``backend`` ranks exchange the addresses of
    their buffers.
    """
    base = import_module(MODULE)
    if base.is_ub_initialized():
        return
    base.initialize_ub(
        shape=[tokens, hidden],
        tp_size=ranks,
        quantization_modes=[base.UserBufferQuantizationMode.FP8 if fp8 else base.UserBufferQuantizationMode.NONE],
        dtype=dtype,
        bootstrap_backend=backend,
    )


def close_buffers() -> None:
    """Frees the buffers, if there are any."""
    base = sys.modules.get(MODULE)
    if base is not None and base.is_ub_initialized():
        base.destroy_ub()
