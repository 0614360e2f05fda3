"""Adapters of the output layer in SGLang 0.5.23 with the `torch_native` backend, which servers on a CPU use.

A prefill computes logits of some positions only: the last one of each request, and those whose log-probs are asked for.
SGLang's other backends know which of these rows belongs to which adapter. `torch_native` divides them as it divides all
positions, so that a batch with several adapters gets the first one's logits, or another one's. And where the vocabulary
is so small that a rank has nothing of it but padding, it drops the padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from megasync_patches import Patch


def _rows_of(batch: Any, indices: Sequence[int], lengths: Sequence[int]) -> Any:
    """The division of rows among adapters: segments of ``lengths`` rows, each of the adapter with that index."""
    return dataclasses.replace(
        batch,
        weight_indices_cpu=torch.tensor(indices, dtype=torch.int32),
        seg_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
        expected_tokens=sum(lengths),
    )


def _with_rows(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product with the factors of adapters that divides its rows as it is told."""

    @wraps(product)
    def divided(self: Any, *args: Any, pruned_batch_info: Any = None, **options: Any) -> Any:
        whole = self.batch_info
        self.batch_info = pruned_batch_info or whole
        try:
            return product(self, *args, **options)
        finally:
            self.batch_info = whole

    return divided


def _keeping(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product that is added to what it is given, also if there are no factors."""

    @wraps(product)
    def added(self: Any, x: torch.Tensor, weights: torch.Tensor, *args: Any, **options: Any) -> Any:
        base = options.get("base_output")
        return base if base is not None and not weights.numel() else product(self, x, weights, *args, **options)

    return added


def _apply() -> None:
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend as Backend
    from sglang.srt.lora.utils import get_lm_head_pruned_lens

    prepare = Backend.prepare_lora_batch

    def prepare_with_head(self: Any, forward_batch: Any, weight_indices: list[int], *args: Any, **options: Any) -> None:
        prepare(self, forward_batch, weight_indices, *args, **options)
        self.lm_head_batch_info = self.lm_head_pass_batch_infos = None
        if (rows := get_lm_head_pruned_lens(forward_batch)) is not None:
            self.lm_head_batch_info = _rows_of(self.batch_info, weight_indices, rows)
            # Many rows are computed in several passes.
            if passes := self._get_lm_head_pass_segments(weight_indices, rows):
                self.lm_head_pass_batch_infos = [_rows_of(self.batch_info, *segments) for segments in passes]

    Backend.prepare_lora_batch = prepare_with_head
    Backend.run_lora_a_sgemm = _with_rows(Backend.run_lora_a_sgemm)
    Backend.run_lora_b_sgemm = _keeping(_with_rows(Backend.run_lora_b_sgemm))


PATCH = Patch(
    name="sglang_cpu_lora_head",
    package="sglang",
    versions=("0.5.23",),
    reason="on a CPU: adapters of the output layer apply to the rows of their own requests",
    apply=_apply,
)
