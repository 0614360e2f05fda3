"""A microbatch as tensors: packed token ids, the segments they form, and the rows whose logits are wanted.

A *segment* is a run of packed tokens that attends causally to itself and, when it continues a prompt, to all of that
prompt's segment. A tree with one sample is a single segment; otherwise its prompt and each response is one.
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
    """What Megatron hands down to attention and rotary embedding, with the fields that this package adds.

    ``rows`` [targets]: packed position whose hidden state predicts each target. ``positions`` [tokens]: of each token
    in its sequence, and ``plan``: how to attend; both None for Transformer Engine, which goes by ``cu_seqlens``.
    """

    rows: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    plan: AttentionPlan | None = None


@dataclass(frozen=True)
class Batch:
    """One microbatch on its device.

    Shapes: ``ids`` [1, tokens]; ``targets`` [targets], grouped by sample in the order of ``samples``, whose
    ``counts`` say how many targets each has. ``counted`` false marks a masked copy; the last ``padding`` tokens fill
    the microbatch up.
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
        """Which sample each target belongs to, as 0, 1, 2, ...; int64 [targets]."""
        counts = torch.tensor(self.counts, device=self.targets.device)
        return torch.repeat_interleave(torch.arange(len(self.counts), device=self.targets.device), counts)


class _Layout:
    """Grows the packed run tree by tree."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []
        self.rows: list[int] = []
        self.targets: list[int] = []
        self.samples: list[int] = []
        self.counts: list[int] = []

    def add_segment(self, ids: Sequence[int], first_position: int = 0, prefix: int | None = None) -> int:
        """Appends a run of tokens; returns where it starts."""
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
    """Tensors of one microbatch; the token count is padded to its room, and to a ``multiple``, by a segment that nothing
    reads.

    ``flavour`` is the layer spec's: "te" for plain sequences, "local" for trees.
    """
    layout = _Layout()
    for tree in microbatch.trees:
        layout.add_tree(tree, samples)
    padding = max(microbatch.room - len(layout.ids), 0)
    padding += -(len(layout.ids) + padding) % multiple
    if padding:
        layout.add_segment([0] * padding)

    def tensor(values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    rows = tensor(layout.rows)
    if flavour == "te":
        lengths = [segment.length for segment in layout.segments]
        starts = tensor([0, *accumulate(lengths)], torch.int32)
        packed = PackedTokens("thd", starts, starts, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths), rows=rows)
    else:
        whole = tensor([0, len(layout.ids)], torch.int32)
        packed = PackedTokens(
            "thd",
            whole,
            whole,
            max_seqlen_q=len(layout.ids),
            max_seqlen_kv=len(layout.ids),
            rows=rows,
            positions=tensor(layout.positions),
            plan=plan_attention(layout.segments, device),
        )
    return Batch(
        ids=tensor(layout.ids)[None],
        targets=tensor(layout.targets),
        samples=tuple(layout.samples),
        counts=tuple(layout.counts),
        packed=packed,
        counted=microbatch.counted,
        padding=padding,
    )
