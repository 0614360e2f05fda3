"""Floating-point operations of a model, and the peak of a device: what model FLOPs utilization (MFU) is computed from.

Counted is what the model needs (Chowdhery et al. 2022, "PaLM", appendix B), not what an implementation adds: matrix
products of weights, of active experts only, and attention over the query-key pairs that its mask leaves. A multiply-add
is two operations, and a backward pass as much work as two forward passes. Work that is repeated to save memory, norms,
activations and the optimizer count nothing. The output layer counts where log-probs are computed, and a prompt that is
computed once for several responses counts once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from megasync.layout.layout import Layout
from megasync.trainer.architecture import chunks_of, window_options
from megasync.trainer.packing import Ints, Lengths, Packing

# Forward and backward of all weights. With adapters the gradients of the frozen weights are not computed.
TRAINING_PASSES, ADAPTER_PASSES = 3, 2
# Peak of dense bfloat16 matrix products in TFLOP/s by NVIDIA's data sheets; the first name that occurs in the
# device's decides.
PEAK_TFLOPS = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800 PCIe": 756.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
}


def peak_tflops(device: str) -> float | None:
    """The peak of a device by the name that CUDA gives it; None for an unknown one."""
    peaks = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device, re.IGNORECASE))
    return next(peaks, None)


@dataclass(frozen=True)
class Work:
    """The work of a pass on all ranks together."""

    # The lengths of prompts that are computed once, [trees].
    roots: Ints
    # The length of each sequence's prompt, and with its response; [sequences].
    starts: Ints
    ends: Ints
    # The tokens whose log-probs are computed.
    targets: int

    @classmethod
    def of(cls, packing: Packing, lengths: Lengths, targets: int) -> Work:
        trees = packing.trees
        prompts = lengths.prompt_tokens[trees.members]
        return cls(prompts[trees.starts[:-1]], prompts, prompts + lengths.response_inputs[trees.members], targets)

    @property
    def tokens(self) -> int:
        return int(self.roots.sum() + (self.ends - self.starts).sum())

    def pairs(self, window: int | None = None, chunk: int | None = None) -> int:
        """Query-key pairs of causal attention.

        A query sees itself and at most ``window`` - 1 tokens before, or those before it in its ``chunk`` positions.
        """
        of_responses = _pairs(self.ends, window, chunk) - _pairs(self.starts, window, chunk)
        return int(_pairs(self.roots, window, chunk).sum() + of_responses.sum())


def _pairs(lengths: Ints, window: int | None, chunk: int | None) -> Ints:
    """Query-key pairs of sequences of these lengths."""
    if chunk is not None:
        rest = lengths % chunk
        return lengths // chunk * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
    short = lengths if window is None else np.minimum(lengths, window)
    return short * (short + 1) // 2 + (lengths - short) * short


@dataclass(frozen=True)
class ModelFlops:
    """The operations of one forward pass."""

    # Of each token, of each target, and of each pair in each attention layer.
    token: float
    target: float
    pair: float
    # Layers that attend to all tokens, and those that attend to the tokens in a window or a chunk.
    full: int
    limited: int = 0
    window: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, layout: Layout) -> ModelFlops:
        sizes = layout.sizes
        active = sizes.topk / sizes.experts if sizes.experts else 0.0
        weights = 0.0
        for name, shape in layout.hf_tensors.items():
            # Every token is multiplied by each weight that is no vector. Packed experts and convolutions have three
            # dimensions.
            if len(shape) > 1 and ".layers." in name and not name.endswith("bias"):
                weights += math.prod(shape) * (active if ".experts." in name else 1.0)
        delta = sizes.delta
        # A state of each value head is read, corrected, and read again (Yang et al. 2024, "Gated Delta Networks").
        state = 3 * delta.values * delta.key_dim * delta.value_dim * len(sizes.delta_layers) if delta else 0
        value_dim = sizes.value_dim or sizes.head_dim
        options, chunks = window_options(layout.hf_config), chunks_of(layout.hf_config)
        limited = sum(options["window_attn_skip_freq"]) if options else 0
        limited = sizes.layers - len(chunks.full) if chunks else limited
        return cls(
            token=2.0 * (weights + state),
            target=2.0 * sizes.hidden * (1 if layout.value_head else sizes.vocab),
            pair=2.0 * sizes.heads * (sizes.head_dim + value_dim),
            full=sizes.layers - len(sizes.delta_layers) - limited,
            limited=limited,
            window=options["window_size"][0] + 1 if options else None,
            chunk=chunks.size if chunks else None,
        )

    def forward(self, work: Work) -> float:
        """Operations of a forward pass on all ranks together."""
        pairs = self.full * work.pairs()
        if self.limited:
            pairs += self.limited * work.pairs(self.window, self.chunk)
        return self.token * work.tokens + self.target * work.targets + self.pair * pairs
