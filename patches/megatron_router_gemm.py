"""Lets Megatron's router compute without Transformer Engine.

The router's linear layer uses torch if ``te_general_gemm`` is None, but the name is only defined if Transformer Engine
can be imported. The patch defines it as None where it is undefined.
"""

from __future__ import annotations

from megasync_patches import Patch


def _apply() -> None:
    from megatron.core.transformer.moe import moe_utils

    moe_utils.__dict__.setdefault("te_general_gemm", None)


PATCH = Patch(
    name="megatron-router-gemm",
    package="megatron-core",
    versions=("0.16.1",),
    mended=("0.19.2",),
    reason="the router uses a name that only exists with Transformer Engine",
    apply=_apply,
)
