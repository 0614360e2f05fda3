"""What a rehearsed stage keeps for its backward passes: a forward pass over tensors without values, with hooks on all
tensors that autograd saves.

Where Megatron reads values, something stands in. Each router sends the same number of tokens to every expert, and this
rank's experts receive `planning.memory.IMBALANCE` times their share, as the plan assumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode

from megasync.config.schema import Config
from megasync.planning.memory import IMBALANCE, in_flight, longest_sequence, microbatch_tokens, recompute_peak
from megasync.trainer.architecture import token_multiple
from megasync.trainer.batch import Batch, Sample, make_batch
from megasync.trainer.gated_delta_net import CHUNK, GatedDeltaNet
from megasync.trainer.learner import MegatronLearner
from megasync.trainer.model import PolicyModel
from megasync.trainer.packing import Microbatch

CPU = torch.device("cpu")


def saved_bytes(learner: MegatronLearner, config: Config) -> int:
    """Bytes that a stage of a built rank saves, with as many microbatches in flight as its schedule has.

    Each microbatch has all tokens that the configuration allows. With ``trainer.recompute=full``: the inputs of all
    layers, and what the layer that is computed again saves beside its input.
    """
    batch = _largest_batch(learner, config)
    counts = in_flight(learner.topology.pipeline, learner.topology.virtual, learner.coords.pp)
    weight_storages = {
        weight.untyped_storage()._cdata for weight in (*learner.weights.values(), *learner.trained.values())
    }
    with _without_values(learner):
        passes = [_Forward(chunk, batch, weight_storages) for chunk in learner.chunks]
        total = sum(each.nbytes * count for each, count in zip(passes, counts, strict=True))
        if config.trainer.recompute == "full":
            most = config.trainer.recompute_layers
            with patch.object(learner.chunks[0].config, "recompute_granularity", None):
                total += max(
                    layer for chunk in learner.chunks for layer in _Forward(chunk, batch, weight_storages).layers[:most]
                )
        elif config.trainer.recompute == "selective":
            # Modules of a layer cannot be switched back, so this part is not measured.
            total += recompute_peak(config, learner.layout, learner.coords.pp)
    return total


class _Forward:
    """A forward pass of a chunk. ``nbytes`` are saved in all, ``layers`` by each decoder layer beside its input."""

    def __init__(self, chunk: PolicyModel, batch: Batch, weight_storages: set[int]) -> None:
        self._chunk, self._own = chunk, weight_storages
        # Storages are kept, so that no later one has the same address.
        self._storages: dict[int, torch.UntypedStorage] = {}
        size = chunk.config.tensor_model_parallel_size if chunk.config.sequence_parallel else 1
        hidden = torch.empty(
            (batch.ids.shape[1] // size, 1, chunk.config.hidden_size),
            dtype=chunk.config.params_dtype,
            device=batch.ids.device,
            requires_grad=True,
        )
        if not chunk.pre_process:
            chunk.set_input_tensor(hidden)
        before: list[int] = []
        blocks: Any = chunk.decoder.layers
        hooks = [block.register_forward_pre_hook(lambda *_: before.append(self.nbytes)) for block in blocks]
        hooks.append(blocks[-1].register_forward_hook(lambda *_: before.append(self.nbytes)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
                chunk(batch.ids, None, None, packed_seq_params=batch.packed)
        finally:
            for hook in hooks:
                hook.remove()
        inputs = hidden.untyped_storage().nbytes()
        self.layers = [stop - start - inputs for start, stop in pairwise(before)]

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._storages[storage._cdata] = storage
        return tensor


def _largest_batch(learner: MegatronLearner, config: Config) -> Batch:
    """A microbatch of the longest sequences that the configuration allows. Boundaries of sequences have values."""
    context, longest, prompt = learner.topology.context, longest_sequence(config), config.data.prompt.max_tokens
    tokens = microbatch_tokens(config) * context
    # The last sequence takes the rest, with as much of it a prompt. Of a response, all tokens but the last are fed.
    lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 1)
    prompts = [max(1, prompt * length // longest) for length in lengths]
    samples = [
        Sample.of(np.zeros(first, np.int32), np.zeros(length - first + 1, np.int32))
        for first, length in zip(prompts, lengths, strict=True)
    ]
    microbatch = Microbatch(tuple((index,) for index in range(len(samples))), tokens, room=tokens)
    batch = make_batch(
        microbatch,
        samples,
        index=0,
        multiple=token_multiple(learner.trainer_config),
        device=learner.device.torch_device,
        flavour=learner.device.spec,
        context=(context, learner.coords.cp),
    )
    chunks = 2 * context if context > 1 else 1
    ends = np.cumsum([0, *(-(-length // chunks) * chunks for length in lengths)])
    starts = torch.tensor(ends, dtype=torch.int32, device=CPU)
    batch.packed.cu_seqlens_q = batch.packed.cu_seqlens_kv = starts
    if context > 1:
        batch.packed.cu_seqlens_q_padded = batch.packed.cu_seqlens_kv_padded = starts
    return batch


# Stand-ins for what reads values


@contextmanager
def _without_values(learner: MegatronLearner) -> Iterator[None]:
    with (
        patch.object(MoEAlltoAllTokenDispatcher, "preprocess", _even_routing),
        patch.object(GatedDeltaNet, "_plain", _kernels),
        _SelectEvenly(learner.layout.sizes.topk),
    ):
        if learner.device.spec != "te":
            yield
            return
        from transformer_engine.pytorch.attention.dot_product_attention import (  # pyright: ignore[reportMissingImports]
            context_parallel,
        )
        from transformer_engine.pytorch.ops.basic import rmsnorm  # pyright: ignore[reportMissingImports]

        # Transformer Engine takes weights on the meta device for ones that it must still create. Torch's fake backend
        # has no messages between two ranks.
        with (
            patch.object(rmsnorm.RMSNorm, "pre_first_fuser_forward", lambda self: None),
            patch.object(context_parallel, "flash_attn_p2p_communicate", lambda *_: []),
        ):
            yield


def _even_routing(self: MoEAlltoAllTokenDispatcher, routing_map: torch.Tensor) -> torch.Tensor:
    """Megatron's `preprocess`, with numbers of tokens that are assumed and not counted."""
    sent = self.num_out_tokens = routing_map.shape[0] * self.config.moe_router_topk
    received = int(sent * min(IMBALANCE, self.ep_size))
    chunks = self.tp_size * self.ep_size
    self.input_splits = _parts(sent, self.ep_size)
    # From each rank with the same tensor coordinate, then from the others.
    self.output_splits = _parts(received, self.ep_size)
    self.output_splits_tp = torch.full((self.tp_size,), received, device=CPU)
    per_expert = torch.stack(
        [_parts(int(part), self.num_local_experts) for part in _parts(received * self.tp_size, chunks)]
    )
    self.num_global_tokens_per_local_expert = per_expert
    if chunks > 1:
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
    return per_expert.sum(0)


def _parts(total: int, count: int) -> torch.Tensor:
    """`total` in `count` parts that differ by one at most."""
    return torch.tensor([total // count + (part < total % count) for part in range(count)], device=CPU)


def _kernels(
    self: GatedDeltaNet, mixed: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, plan: Any
) -> torch.Tensor:
    """The shape of a gated delta rule's output; saves what flash-linear-attention's kernels save."""
    convolved = _FusedNorm.apply(mixed.contiguous())
    query, key, value = (part.contiguous() for part in self._split(convolved))  # pyright: ignore[reportPrivateUsage]
    return _DeltaRule.apply(query, key, value, decay, rate.to(value.dtype))


class _DeltaRule(torch.autograd.Function):
    """Saves queries and keys after their norm, values, decays, rates, and the solved system of each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        rate: torch.Tensor,
    ) -> torch.Tensor:
        normed = torch.empty_like(query), torch.empty_like(key)
        lengths = query.new_empty((2, *query.shape[:-1]), dtype=torch.float32)
        solved = query.new_empty((*query.shape[:-1], CHUNK))
        ctx.save_for_backward(*normed, lengths, value, torch.empty_like(decay), rate, solved)
        return torch.empty_like(value)


class _FusedNorm(torch.autograd.Function):
    """The shape of a norm's output, or of a convolution's; saves the input."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return torch.empty_like(rows)


class _SelectEvenly(TorchFunctionMode):
    """Lets `masked_select` by a routing map find as many experts for each token as the router chooses."""

    def __init__(self, topk: int) -> None:
        super().__init__()
        self._topk = topk

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.masked_select and args[0].is_meta:
            values, mask = args
            # By an index, so that autograd saves what a selection would save.
            return values.flatten()[: mask.shape[-1] * self._topk].clone()
        if func is torch.nn.functional.rms_norm:
            # The kernel of a GPU saves its input. Elsewhere torch takes the norm apart, and saves several copies.
            return _FusedNorm.apply(args[0])
        return func(*args, **(kwargs or {}))
