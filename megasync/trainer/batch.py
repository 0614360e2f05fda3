"""A microbatch as tensors: packed token ids, their segments, and the rows whose logits are needed.

A *segment* is a range of packed tokens that attends causally to itself and, if it continues a prompt, to the whole
segment of that prompt. A tree with one sample is a single segment; otherwise its prompt and each response are segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megasync.trainer.attention import AttentionPlan, Segment, plan_attention
from megasync.trainer.packing import Microbatch, Sample, Tree


@dataclass
class PackedTokens(PackedSeqParams):
    """What Megatron passes to attention and rotary embedding, with additional fields.

    ``rows`` [targets] are the packed positions whose hidden states predict the targets. ``positions`` [tokens] are the
    positions of tokens in their sequences, ``plan`` says how to attend; both are None for Transformer Engine, which
    uses ``cu_seqlens``.
    """

    rows: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    plan: AttentionPlan | None = None


@dataclass(frozen=True)
class Batch:
    """One microbatch on its device.

    ``ids`` are [1, tokens]. ``targets`` [targets] are grouped by sample, in the order of ``samples``; ``counts`` are
    the numbers of targets per sample. ``counted`` is false for a masked copy. The last ``padding`` tokens are padding.
    """

    ids: torch.Tensor
    targets: torch.Tensor
    samples: tuple[int, ...]
    counts: tuple[int, ...]
    packed: PackedTokens
    counted: bool
    padding: int

    @property
    def uncounted(self) -> torch.Tensor:
        """[1, tokens], true at padding, and everywhere in a masked copy."""
        counted = self.ids.shape[1] - self.padding if self.counted else 0
        return (torch.arange(self.ids.shape[1], device=self.ids.device) >= counted)[None]

    @property
    def segments(self) -> torch.Tensor:
        """The index into ``samples`` of each target's sample; int64 [targets]."""
        counts = torch.tensor(self.counts, device=self.targets.device)
        return torch.repeat_interleave(torch.arange(len(self.counts), device=self.targets.device), counts)


class _Packing:
    """Builds a packed microbatch tree by tree."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []
        self.rows: list[int] = []
        self.targets: list[int] = []
        self.samples: list[int] = []
        self.counts: list[int] = []

    def add_segment(self, ids: Sequence[int], first_position: int = 0, prefix: int | None = None) -> int:
        """Appends a segment; returns its first packed position."""
        start = len(self.ids)
        self.ids += ids
        self.positions += range(first_position, first_position + len(ids))
        self.segments.append(Segment(start, len(ids), prefix))
        return start

    def add_tree(self, tree: Tree, samples: Sequence[Sample]) -> None:
        members = [samples[index] for index in tree.members]
        prompt = len(tree.prompt)
        if len(members) == 1:
            only = members[0]
            starts = [self.add_segment([*tree.prompt, *only.response[: only.fed]]) + prompt]
        else:
            root = len(self.segments)
            self.add_segment(tree.prompt)
            starts = []
            for member in members:
                starts.append(len(self.ids))
                if member.fed:
                    self.add_segment(member.response[: member.fed], prompt, root)
        last_of_prompt = starts[0] - 1
        for index, member, start in zip(tree.members, members, starts, strict=True):
            self.rows += [start + offset - 1 if offset else last_of_prompt for offset in member.scored]
            self.targets += [member.response[offset] for offset in member.scored]
            self.samples.append(index)
            self.counts.append(len(member.scored))


def make_batch(
    microbatch: Microbatch, samples: Sequence[Sample], *, multiple: int, device: torch.device, flavour: str
) -> Batch:
    """The tensors of one microbatch, padded to its room and to a multiple of ``multiple`` tokens by an unused segment.

    ``flavour`` is that of the layer spec: "te" for plain sequences, "local" for trees.
    """
    packing = _Packing()
    for tree in microbatch.trees:
        packing.add_tree(tree, samples)
    padding = max(microbatch.room - len(packing.ids), 0)
    padding += -(len(packing.ids) + padding) % multiple
    if padding:
        packing.add_segment([0] * padding)

    def tensor(values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    # With a plan, attention sees the whole microbatch as one sequence.
    lengths = [segment.length for segment in packing.segments] if flavour == "te" else [len(packing.ids)]
    starts, longest = tensor([0, *accumulate(lengths)], torch.int32), max(lengths)
    packed = PackedTokens("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest, rows=tensor(packing.rows))
    if flavour != "te":
        packed.positions = tensor(packing.positions)
        packed.plan = plan_attention(packing.segments, device)
    return Batch(
        ids=tensor(packing.ids)[None],
        targets=tensor(packing.targets),
        samples=tuple(packing.samples),
        counts=tuple(packing.counts),
        packed=packed,
        counted=microbatch.counted,
        padding=padding,
    )
