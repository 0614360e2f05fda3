"""A stand-in for DeepEP: what Megatron's dispatcher `flex` calls of it, over all-to-all of the process group.

Tokens really move between ranks. As in DeepEP, a token is sent once to each rank that has any of its experts, and the
results of these ranks are added up; received indices count a rank's own experts, with -1 for those of others.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


def install() -> None:
    """Makes `deep_ep` importable in this process. Megatron must not have been imported."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    # Without HybridEPBuffer, which Megatron looks for too.
    vars(package).update(Buffer=Buffer, utils=utils)
    vars(utils).update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}


class EventHandle:
    """A moment of a stream, which has always passed."""


class EventOverlap:
    """Waits for a moment of a stream."""

    def __init__(self, event: EventHandle | None = None) -> None: ...

    def current_stream_wait(self) -> None: ...


class Config:
    """Sizes of DeepEP's communication buffers, of which there are none here."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class DispatchHandle(NamedTuple):
    """Where tokens went: ``rows`` of this rank in the order of the ranks that got them, and numbers by rank."""

    rows: torch.Tensor
    sent: list[int]
    received: list[int]
    tokens: int


class Buffer:
    """Moves tokens within ``group``."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(ranks: int) -> Config:
        return Config()

    @staticmethod
    def set_num_sms(number: int) -> None: ...

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, **_: Any
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Tokens for each rank and for each expert, and which token goes to which rank, bool [tokens, ranks]."""
        ranks = self.group.size()
        chosen = torch.zeros(len(topk_idx), num_experts, dtype=torch.bool)
        valid = topk_idx >= 0
        rows = torch.arange(len(topk_idx))[:, None].expand_as(topk_idx)
        chosen[rows[valid], topk_idx[valid]] = True
        to_rank = chosen.view(len(topk_idx), ranks, -1).any(dim=-1)
        return to_rank.sum(dim=0), None, chosen.sum(dim=0), to_rank, EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: DispatchHandle | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, list[int], DispatchHandle, EventOverlap]:
        """Sends tokens [tokens, hidden] to the ranks of their experts; with ``handle`` to where others went before."""
        if handle is not None:
            return self._forth(x[handle.rows], handle), None, None, [], handle, EventOverlap()
        assert topk_idx is not None and topk_weights is not None
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        ranks = self.group.size()
        local_experts = len(num_tokens_per_expert) // ranks
        places = [is_token_in_rank[:, rank].nonzero().flatten() for rank in range(ranks)]
        sent = torch.tensor([len(rows) for rows in places])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        handle = DispatchHandle(torch.cat(places), sent.tolist(), received.tolist(), len(x))
        local = [topk_idx[rows] - rank * local_experts for rank, rows in enumerate(places)]
        foreign = torch.cat([(each < 0) | (each >= local_experts) for each in local])
        indices = self._forth(torch.cat(local).masked_fill(foreign, -1), handle)
        weights = self._forth(topk_weights[handle.rows].masked_fill(foreign, 0.0), handle)
        counts = torch.bincount(indices[indices >= 0].flatten(), minlength=local_experts).tolist()
        return self._forth(x[handle.rows], handle), indices, weights, counts, handle, EventOverlap()

    def combine(
        self, x: torch.Tensor, handle: DispatchHandle, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sends tokens back to where they came from and adds up what several ranks made of one; likewise weights."""
        combined = self._back(x, handle)
        weights = None if topk_weights is None else self._back(topk_weights, handle)
        return combined, weights, EventOverlap()

    def _forth(self, values: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        arrived = values.new_empty(sum(handle.received), *values.shape[1:])
        dist.all_to_all_single(arrived, values.contiguous(), handle.received, handle.sent, group=self.group)
        return arrived

    def _back(self, values: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        returned = values.new_empty(sum(handle.sent), *values.shape[1:])
        dist.all_to_all_single(returned, values.contiguous(), handle.sent, handle.received, group=self.group)
        total = torch.zeros(handle.tokens, *values.shape[1:], dtype=torch.float32)
        return total.index_add_(0, handle.rows, returned.float()).to(values.dtype)
