"""A microbatch as tensors: packed token ids, their segments, and the rows whose logits are needed.

A *segment* is a range of packed tokens that attends causally to itself and, if it continues a prompt, to the whole
segment of that prompt. A tree with one sample is a single segment; otherwise its prompt and each response are segments.

Tokens are numpy arrays until they are tensors: Python loops go over samples, never over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray

from megasync.layout.routes import RouteArray
from megasync.trainer.attention import AttentionPlan, Segment, plan_attention
from megasync.trainer.context import ContextPlan, plan_context, split_tokens
from megasync.trainer.logprobs import TargetSupport
from megasync.trainer.packing import Ints, Lengths, Microbatch
from megasync.trajectory import Ids, Support


@dataclass(frozen=True)
class Sample:
    """A prompt and a response, and the response tokens whose log-probs are computed."""

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    # The response offsets whose log-probs are computed: integers, ascending, not empty. With ``targets`` some may be
    # negative, counted back from the end of the prompt, or the same.
    scored: NDArray[Any]
    # Only so many response tokens are inputs of the model: the last scored one, and what follows, predicts none.
    response_inputs: int
    # The experts of at least all inputs, [positions, expert layers, experts per token]; None if the trainer's own
    # router chooses them.
    routes: RouteArray | None = None
    # The support of each scored token; None if each could be any token.
    support: Support | None = None
    # The token that is scored at each offset; None if it is that of the response.
    targets: NDArray[np.int32] | None = None

    @classmethod
    def of(cls, prompt: Ids, response: Ids, scored: Ids | None = None) -> Sample:
        """From any sequences; by default every response token is scored."""
        offsets = np.arange(len(response)) if scored is None else np.asarray(scored, dtype=np.int64)
        return cls(np.asarray(prompt, np.int32), np.asarray(response, np.int32), offsets, int(offsets[-1]))


# Samples by their index; a rank has only those that it computes.
Samples = Mapping[int, Sample] | Sequence[Sample]


def lengths_of(samples: Sequence[Sample]) -> Lengths:
    """The lengths of samples whose prompts are compared token by token."""
    prompts: dict[bytes, int] = {}
    numbers = [prompts.setdefault(sample.prompt.tobytes(), len(prompts)) for sample in samples]
    columns = (numbers, [len(sample.prompt) for sample in samples], [sample.response_inputs for sample in samples])
    return Lengths(*(np.array(column, dtype=np.int64) for column in columns))


@dataclass
class PackedTokens(PackedSeqParams):
    """The parameters that Megatron passes to attention and rotary embedding, with additional fields."""

    # The positions among this rank's tokens whose hidden states predict targets, [own targets].
    rows: torch.Tensor | None = None
    # The positions of tokens in their sequences, [tokens]; None if `cu_seqlens_q` tells them.
    positions: torch.Tensor | None = None
    # How to attend; None for Transformer Engine, which uses `cu_seqlens_q`.
    plan: AttentionPlan | ContextPlan | None = None
    # Made by the first layer that needs them: a plan of those sequences, their split over ranks, and their chunks as
    # sequences.
    sequences: AttentionPlan | None = None
    context: ContextPlan | None = None
    chunks: PackedTokens | None = None


@dataclass(frozen=True)
class Batch:
    """One microbatch on its device."""

    # Its position among the rank's microbatches.
    index: int
    # The ids of this rank's tokens, [1, tokens].
    ids: torch.Tensor
    # Grouped by sample, in the order of `Microbatch.sequences`; [targets].
    targets: torch.Tensor
    # The number of targets of each sample.
    counts: tuple[int, ...]
    packed: PackedTokens
    # False for a masked copy.
    counted: bool
    # True at padding, [1, tokens].
    padding: torch.Tensor
    # The places of those targets that this rank's tokens predict; None if it has all tokens.
    kept: torch.Tensor | None = None
    # The experts to replay, if there are any, [tokens, expert layers, experts per token].
    routes: torch.Tensor | None = None
    # The support of the targets that this rank's tokens predict; None if each could be any token.
    support: TargetSupport | None = None

    @property
    def own_targets(self) -> torch.Tensor:
        """The targets that this rank's tokens predict."""
        return self.targets if self.kept is None else self.targets[self.kept]

    @property
    def uncounted(self) -> torch.Tensor:
        """[1, tokens], true at padding, and everywhere in a masked copy."""
        return self.padding if self.counted else torch.ones_like(self.padding)

    @property
    def segments(self) -> torch.Tensor:
        """The position of each target's sample among the samples; int64 [targets]."""
        counts = torch.tensor(self.counts, device=self.targets.device)
        return torch.repeat_interleave(torch.arange(len(self.counts), device=self.targets.device), counts)


class _Packed:
    """Builds a packed microbatch tree by tree."""

    def __init__(self) -> None:
        self.tokens = 0
        # Of the segments that are added next.
        self.owner = 0
        self.ids: list[NDArray[np.int32]] = []
        self.segments: list[Segment] = []
        # The position in its sequence of each segment's first token.
        self.first_positions: list[int] = []
        self.rows: list[Ints] = []
        self.targets: list[NDArray[np.int32]] = []
        self.supports: list[Support | None] = []
        self.padding: list[range] = []
        # One array for each of `ids`, or for several of them.
        self.routes: list[RouteArray] = []

    def add_segment(self, *ids: NDArray[np.int32], first_position: int = 0, prefix: int | None = None) -> int:
        """Appends a segment; returns its first packed position."""
        start = self.tokens
        self.ids += ids
        self.tokens += sum(map(len, ids))
        self.segments.append(Segment(start, self.tokens - start, prefix, self.owner))
        self.first_positions.append(first_position)
        return start

    def pad(self, tokens: int, *, apart: bool) -> None:
        """Appends padding, as a segment of its own (``apart``) or to the last segment.

        It repeats the tokens before it, with their routes: copies of a single token would all go to the same experts.
        """
        if not tokens:
            return
        self.padding.append(range(self.tokens, self.tokens + tokens))
        if self.routes:
            routes = np.concatenate(self.routes)
            self.routes.append(np.resize(routes, (tokens, *routes.shape[1:])))
        start = self.add_segment(np.resize(np.concatenate(self.ids), tokens))
        if not apart:
            self.segments.pop()
            self.first_positions.pop()
            last = self.segments[-1]
            self.segments[-1] = last._replace(length=start + tokens - last.start)

    def add_routes(self, members: Sequence[Sample]) -> None:
        """Adds the routes of a tree. A prompt that is computed once takes those of its first response."""
        first = 0
        for member in members:
            assert member.routes is not None
            self.routes.append(member.routes[first : len(member.prompt) + member.response_inputs])
            first = len(member.prompt)

    def add_tree(self, members: Sequence[Sample]) -> None:
        prompt = members[0].prompt
        if len(members) == 1:
            (only,) = members
            starts = [self.add_segment(prompt, only.response[: only.response_inputs]) + len(prompt)]
        else:
            root = len(self.segments)
            self.add_segment(prompt)
            starts = []
            for member in members:
                starts.append(self.tokens)
                if member.response_inputs:
                    self.add_segment(member.response[: member.response_inputs], first_position=len(prompt), prefix=root)
        for member, start in zip(members, starts, strict=True):
            # The last token of the prompt, which may be that of others too, predicts the first of the response.
            first = np.where(member.scored > 0, start, starts[0])
            self.rows.append(member.scored.astype(np.int64) + first - 1)
            self.targets.append(member.response[member.scored] if member.targets is None else member.targets)
            self.supports.append(member.support)

    def support(self) -> Support | None:
        """The support of all targets; None if each could be any token."""
        if not any(self.supports):
            return None
        parts = zip(self.supports, self.targets, strict=True)
        return Support.join(Support.whole(len(targets)) if part is None else part for part, targets in parts)

    def positions(self) -> Ints:
        lengths = [segment.length for segment in self.segments]
        shifts = [first - segment.start for first, segment in zip(self.first_positions, self.segments, strict=True)]
        return np.arange(self.tokens) + np.repeat(np.array(shifts), lengths)


def make_batch(
    microbatch: Microbatch,
    samples: Samples,
    *,
    index: int,
    multiple: int,
    device: torch.device,
    flavour: str,
    context: tuple[int, int] = (1, 0),
    replays: bool = False,
) -> Batch:
    """The tensors of one microbatch, padded to its room and to a multiple of ``multiple`` tokens by an unused segment.

    ``flavour`` is that of the layer spec: "te" for plain sequences, "local" for trees. ``context`` are the number of
    context-parallel ranks and which of them this one is: with more than one, sequences are plain, each is padded to a
    multiple of twice as many tokens, and the rank gets its share of them (`context.split_tokens`).

    With ``replays`` it has the routes of its samples.
    """
    ranks, rank = context
    chunks = 2 * ranks if ranks > 1 else 1
    packing = _Packed()
    for number, tree in enumerate(microbatch.trees):
        members = [samples[sequence] for sequence in tree]
        packing.owner = microbatch.owners[number] if microbatch.owners else 0
        if replays:
            packing.add_routes(members)
        packing.add_tree(members)
        packing.pad(-packing.tokens % chunks, apart=False)
    room = max(microbatch.room, packing.tokens)
    packing.pad(room - packing.tokens + -room % lcm(chunks, ranks * multiple), apart=True)

    def tensor(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    # With the plan of a tree, attention sees the whole microbatch as one sequence.
    plain = flavour == "te" or ranks > 1
    lengths = [segment.length for segment in packing.segments] if plain else [packing.tokens]
    starts, longest = tensor(np.cumsum([0, *lengths], dtype=np.int32)), max(lengths)
    packed = PackedTokens("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
    ids, rows = np.concatenate(packing.ids, dtype=np.int64), np.concatenate(packing.rows)
    padding = np.zeros(packing.tokens, dtype=bool)
    for part in packing.padding:
        padding[part.start : part.stop] = True
    routes = np.concatenate(packing.routes, dtype=np.int16) if replays else None
    kept, support = None, packing.support()
    if ranks > 1:
        local_tokens = split_tokens(lengths, ranks)[rank]
        place = np.full(packing.tokens, -1)
        place[local_tokens] = np.arange(len(local_tokens))
        ids, padding, rows = ids[local_tokens], padding[local_tokens], place[rows]
        routes = None if routes is None else routes[local_tokens]
        kept = np.flatnonzero(rows >= 0)
        rows = rows[kept]
        support = None if support is None else support.at(kept)
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = starts
    packed.rows = tensor(rows)
    if ranks > 1 and flavour != "te":
        packed.plan = plan_context(lengths, ranks, rank, device)
    elif flavour != "te":
        packed.positions = tensor(packing.positions())
        packed.plan = plan_attention(packing.segments, device)
    return Batch(
        index=index,
        ids=tensor(ids)[None],
        targets=tensor(np.concatenate(packing.targets, dtype=np.int64)),
        counts=tuple(map(len, packing.targets)),
        packed=packed,
        counted=microbatch.counted,
        padding=tensor(padding)[None],
        kept=None if kept is None else tensor(kept),
        routes=None if routes is None else tensor(routes),
        support=None if support is None else TargetSupport.of(support, device),
    )
