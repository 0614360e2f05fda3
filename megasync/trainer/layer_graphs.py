"""CUDA graphs of decoder layers (`trainer.cuda_graphs`): a layer's forward and backward pass are one launch each.

A graph repeats what was captured: its shapes, the addresses of weights and gradients, and whatever Python decided. A
layer is launched as a graph only where shapes and addresses are as they were, and computes as usual elsewhere:

- Hidden states have the shape of a full microbatch (`trainer.pad_microbatches`).
- Boundaries of sequences are read from a tensor of one length. Sequences that a microbatch does not have are empty.
- Weights are where they were. Those of a reference are elsewhere (`reference.ReferenceWeights`).

Nothing here notices another decision of Python, such as adapters that are turned off for a reference, or experts that
are replayed. The rules of `trainer.cuda_graphs` (`config/schema/training.py`) refuse whatever has such switches.

All microbatches share the memory of one set of graphs. That needs each backward pass before the next forward pass,
which is so without pipeline stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from megasync.trainer.batch import PackedTokens
from megasync.trainer.model import PolicyModel

log = logging.getLogger(__name__)

# Megatron's arguments of a layer that a graph takes, or that never change.
_TAKEN = ("hidden_states", "packed_seq_params", "rotary_pos_emb")
# Attention launches blocks for the greatest length of each sequence, also of an empty one. So a microbatch has at most
# one sequence in so many tokens, but at least a few.
TOKENS_PER_SEQUENCE = 256
FEWEST_SEQUENCES = 8


def most_sequences(tokens: int) -> int:
    """How many sequences a microbatch of ``tokens`` tokens may have to be launched as graphs."""
    return max(FEWEST_SEQUENCES, tokens // TOKENS_PER_SEQUENCE)


class LayerGraphs:
    """The graphs of all layers of ``chunk``, for microbatches of ``tokens`` tokens.

    They are captured here. That runs each layer a few times, so gradients have to be zeroed afterwards. A collective of
    tensor-parallel ranks. Layers without values, as in a rehearsal, cannot be captured and compute as usual.
    """

    def __init__(self, chunk: PolicyModel, tokens: int) -> None:
        config, weight = chunk.config, next(chunk.decoder.parameters())
        self._layers: list[torch.nn.Module] = [] if weight.is_meta else list(chunk.decoder.layers)
        if not self._layers:
            return
        self._tokens = tokens
        # Room for a sequence of padding, and for the end of the last one.
        self._starts = weight.new_full((most_sequences(tokens) + 2,), tokens, dtype=torch.int32)
        self._starts[0] = 0
        # Whose boundaries `_starts` has.
        self._current: PackedTokens | None = None
        packed = PackedTokens("thd", self._starts, self._starts, max_seqlen_q=tokens, max_seqlen_kv=tokens)
        angles = chunk.rotary_pos_emb(packed)
        rows = tokens // config.tensor_model_parallel_size if config.sequence_parallel else tokens
        inputs = [weight.new_zeros(rows, 1, config.hidden_size).requires_grad_() for _ in self._layers]
        self._taken = inputs[0].shape, inputs[0].dtype
        graphed = tuple(_Layer(layer, packed, angles) for layer in self._layers)
        torch.cuda.make_graphed_callables(graphed, tuple((each,) for each in inputs), allow_unused_input=True)
        self._params = [list(layer.parameters()) for layer in self._layers]
        self._addresses = [_addresses(params) for params in self._params]
        # Those whose backward pass adds the gradient to Megatron's buffer, and says so by this mark.
        self._marked = [
            [param for param in params if vars(param).get("grad_added_to_main_grad")] for params in self._params
        ]
        self._modules = [[module for module in layer.modules() if module is not layer] for layer in self._layers]
        for place, layer in enumerate(self._layers):
            vars(layer)["forward"] = partial(self._forward, place, layer.forward, graphed[place])
        log.info("Captured CUDA graphs of %d layers for microbatches of %d tokens", len(self._layers), tokens)

    def close(self) -> None:
        """Has the layers compute as usual."""
        for layer in self._layers:
            del vars(layer)["forward"]

    def _forward(
        self, place: int, stock: Callable[..., Any], graphed: torch.nn.Module, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        if not self._fits(place, options):
            return stock(**options)
        self._set_starts(options["packed_seq_params"])
        for module in self._modules[place]:
            # Megatron's hooks gather weights that an update has left on other ranks.
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
        if torch.is_grad_enabled():
            for param in self._marked[place]:
                vars(param)["grad_added_to_main_grad"] = True
        return graphed(options["hidden_states"]), None

    def _fits(self, place: int, options: dict[str, Any]) -> bool:
        hidden = options["hidden_states"]
        return (
            (hidden.shape, hidden.dtype) == self._taken
            and len(options["packed_seq_params"].cu_seqlens_q) <= len(self._starts)
            and all(value is None for name, value in options.items() if name not in _TAKEN)
            and _addresses(self._params[place]) == self._addresses[place]
        )

    def _set_starts(self, packed: PackedTokens) -> None:
        if packed is self._current:
            return
        assert packed.cu_seqlens_q is not None
        count = len(packed.cu_seqlens_q)
        self._starts[:count].copy_(packed.cu_seqlens_q)
        self._starts[count:] = self._tokens
        self._current = packed


class _Layer(torch.nn.Module):
    """A decoder layer as a function of hidden states alone."""

    def __init__(self, layer: torch.nn.Module, packed: PackedTokens, angles: torch.Tensor) -> None:
        super().__init__()
        self._layer, self._packed, self._angles = layer, packed, angles

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # Past the hooks of the layer itself, which run before a graph is launched.
        output, _ = type(self._layer).forward(
            self._layer,
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self._angles,
            packed_seq_params=self._packed,
        )
        return output


def _addresses(params: Iterable[torch.nn.Parameter]) -> list[int]:
    """The addresses that a graph reads and writes beside its own memory: of weights and gradients."""
    gradients = ((param, vars(param).get("main_grad")) for param in params)
    return [0 if tensor is None else tensor.data_ptr() for pair in gradients for tensor in pair]
