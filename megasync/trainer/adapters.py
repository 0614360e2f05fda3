"""The low-rank adapters of one rank: beside Megatron's linear layers while it trains, merged for everybody else.

A forward hook adds ``scale * up @ down @ x`` to what a linear layer computes. The model's own weights are frozen, so
Megatron makes no gradients, no main weights and no moments for them. The narrow vector ``down @ x`` is what tensor
ranks exchange: gathered over tokens before the rows of ``up`` that a rank holds, summed after its columns of ``down``.
Ranks that share an expert (`trainer.expert_tensor_parallel`) exchange nothing here: all of them get the same tokens,
and Megatron's dispatcher adds up their outputs, and in the backward pass the gradients of their inputs. Of a factor
that each of them holds whole, each computes a part of the gradient; `param_attributes.sum_partial_experts` adds these.

Servers get ``weight + scale * up @ down``, computed in float32 and rounded to the dtype of the model. In bfloat16, a
change far below the distance of two values is lost or doubled by that, so servers sample another policy than the one
that is trained; `Adapters.kept` measures it.

Adapters of the output layer are added to logits, a part of the rows at a time (`logprobs`).
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.nn.functional import linear, rms_norm

from megasync.layout.adapter import DOWN, Adapted, AdapterLayout
from megasync.layout.adapter_files import low_rank_product, spread
from megasync.layout.families import Split
from megasync.layout.layout import Box
from megasync.layout.shards import Read, box_of, fill_params
from megasync.trainer.layer_specs import NormedOutput
from megasync.trainer.model import PolicyModel, TargetHead
from megasync.trainer.param_attributes import set_param_attributes


@dataclass(frozen=True)
class Member:
    """The adapters of one of several models that compute a microbatch together, each its own range of tokens.

    ``own_tokens`` are those that this tensor rank has between layers; all, unless they are split.
    """

    tokens: int
    own_tokens: int
    scale: float
    # Under the names of `Adapters.params`, which have the same shapes.
    params: Mapping[str, torch.Tensor]


class LowRank(torch.nn.Module):
    """The adapters of one linear layer, or of each expert of a grouped one.

    Its parameters are those of `AdapterLayout.params` below the layer's ``adapter``. ``shapes`` has all of these.
    ``split_tokens``: tensor ranks have different tokens between layers.
    """

    sources: torch.Tensor
    # The models that compute the next microbatch in place of the module's own factors, and the module's path in them.
    members: Sequence[Member] = ()
    path: str = ""

    def __init__(
        self,
        layer: torch.nn.Module,
        adapted: Sequence[Adapted],
        layout: AdapterLayout,
        rank: int,
        shapes: Mapping[str, tuple[int, ...]],
        split_tokens: bool,
    ) -> None:
        super().__init__()
        weight = next(layer.parameters(recurse=False))
        self.scale = layout.shape.scale
        first = adapted[0].item
        self._rows = first.split is Split.ROW
        self._is_expert = first.ep is not None
        self._split_tokens = split_tokens
        self._norm = getattr(layer, "layer_norm_weight", None) is not None
        # Names of the factors of each expert, or of the layer.
        self._factors: list[tuple[list[str], str]] = []
        for each in adapted:
            names = [name.rpartition(".")[2] for name in (*each.downs, each.up)]
            for name, long in zip(names, (*each.downs, each.up), strict=True):
                empty = torch.empty(shapes[long], dtype=weight.dtype, device=weight.device)
                self.register_parameter(name, torch.nn.Parameter(empty))
            self._factors.append((names[:-1], names[-1]))
        sources = torch.tensor(layout.sources(first, rank), dtype=torch.long, device=weight.device)
        self.register_buffer("sources", sources, persistent=False)

    def forward(self, layer: torch.nn.Module, x: torch.Tensor, splits: Sequence[int] | None = None) -> torch.Tensor:
        """The change to the output of ``layer`` for its input, [tokens, ..., features]."""
        if self._norm:
            x = _normalised(layer, x)
        if self.members:
            return self._added_by_members(x, *self._factors[0])
        if splits is None:
            return self._added(x, *self._factors[0])
        parts = zip(x.split(list(splits)), self._factors, strict=True)
        return torch.cat([self._added(part, *factors) for part, factors in parts])

    def _added(self, x: torch.Tensor, downs: list[str], up: str) -> torch.Tensor:
        narrow = linear(x, torch.cat([getattr(self, name) for name in downs]))
        if not self._is_expert:
            narrow = self._exchanged(narrow)
        return linear(narrow, spread(getattr(self, up), self.sources, len(downs))) * self.scale

    def _added_by_members(self, x: torch.Tensor, downs: list[str], up: str) -> torch.Tensor:
        tokens = [each.tokens for each in self.members]
        split = [each.own_tokens for each in self.members] if self._split_tokens else tokens
        before, after = (tokens, split) if self._rows else (split, tokens)
        factors = [[each.params[f"{self.path}.adapter.{name}"] for name in (*downs, up)] for each in self.members]
        parts = zip(x.split(before), factors, strict=True)
        narrow = self._exchanged(torch.cat([linear(part, torch.cat(own[:-1])) for part, own in parts]))
        parts = zip(narrow.split(after), factors, self.members, strict=True)
        return torch.cat(
            [linear(part, spread(own[-1], self.sources, len(downs))) * each.scale for part, own, each in parts]
        )

    def _exchanged(self, narrow: torch.Tensor) -> torch.Tensor:
        """The narrow vectors of the tokens that the output of the layer has, whole."""
        if self._rows:
            if self._split_tokens:
                return reduce_scatter_to_sequence_parallel_region(narrow)
            return reduce_from_tensor_model_parallel_region(narrow)
        if self._split_tokens:
            return gather_from_sequence_parallel_region(narrow)
        return copy_to_tensor_model_parallel_region(narrow)


class LowRankHead(torch.nn.Module):
    """The adapters of an output layer, of which a tensor rank has some rows of ``up``, and ``down`` whole.

    ``split_tokens``: Megatron adds the gradients of ``down`` over tensor ranks, as each has those of other tokens.
    Here each has those of its own part of the vocabulary, so that the sum is right, and otherwise it is made here.
    """

    # The one of several models whose rows are scored next, in place of the module's own factors.
    member: Member | None = None
    path: str = ""

    def __init__(
        self,
        adapted: Adapted,
        layout: AdapterLayout,
        shapes: Mapping[str, tuple[int, ...]],
        like: torch.Tensor,
        split_tokens: bool,
    ) -> None:
        super().__init__()
        self.scale = layout.shape.scale
        self._split_tokens = split_tokens
        self._down, self._up = (name.rpartition(".")[2] for name in (*adapted.downs, adapted.up))
        for name, long in ((self._down, adapted.downs[0]), (self._up, adapted.up)):
            self.register_parameter(name, torch.nn.Parameter(like.new_empty(shapes[long])))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The narrow vectors [rows, rank] of hidden states [rows, hidden], scaled, and the rows of ``up``."""
        if self.member is None:
            scale, down, up = self.scale, getattr(self, self._down), getattr(self, self._up)
        else:
            scale = self.member.scale
            down, up = (self.member.params[f"{self.path}.adapter.{name}"] for name in (self._down, self._up))
        if not self._split_tokens:
            down = copy_to_tensor_model_parallel_region(down)
        return linear(rows, down) * scale, up


def _normalised(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weight = layer.layer_norm_weight
    if layer.zero_centered_gamma:
        return rms_norm(x.float(), x.shape[-1:], weight.float() + 1, layer.eps).to(x.dtype)
    # Torch computes it in float32 inside, and keeps the input as it is for the backward pass.
    return rms_norm(x, x.shape[-1:], weight, layer.eps)


def _add(layer: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    values, bias = output
    return values + layer.adapter(layer, *inputs[:2]), bias


@dataclass
class Adapters:
    """The adapters of a rank, which `attach` made; ``weights`` are the model's own, by the names of `Layout.params`."""

    layout: AdapterLayout
    rank: int
    weights: Mapping[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    adapted: Sequence[Adapted]
    # What servers get in place of the adapted weights. Always the same tensors, as the weight sync keeps views of them.
    _merged: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _sources: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    # Of the last merge, over this rank's adapted weights, float64 [3]: the squared norms of the change that the
    # adapters make and of that which merged weights have, and their product. Zero before, and if nothing is rounded.
    kept: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    modules: Sequence[LowRank | LowRankHead] = ()

    def set_scale(self, scale: float) -> None:
        """Multiplies the product of all factors by ``scale`` from now on, in place of that of the layout."""
        for module in self.modules:
            module.scale = scale

    @contextmanager
    def computing_for(self, members: Sequence[Member]) -> Iterator[None]:
        """Lets several models compute the next microbatch; `score_for` chooses whose rows are scored."""
        layers = [module for module in self.modules if isinstance(module, LowRank)]
        try:
            for layer in layers:
                layer.members = members
            yield
        finally:
            for layer in layers:
                layer.members = ()
            self.score_for(None)

    def score_for(self, member: Member | None) -> None:
        """Scores rows with the output layer of one of several models, or with the own one again."""
        for module in self.modules:
            if isinstance(module, LowRankHead):
                module.member = member

    @torch.no_grad()
    def served(self) -> dict[str, torch.Tensor]:
        """The merged weights; all parameters of `Layout.params`. Valid until `merge` writes them again."""
        if not self._merged:
            self._merged = {each.item.param: torch.empty_like(self.weights[each.item.param]) for each in self.adapted}
            self.merge()
        return {name: self._merged.get(name, weight.data) for name, weight in self.weights.items()}

    @torch.no_grad()
    def merge(self) -> None:
        """Writes the current adapters into the merged weights, if there are any yet."""
        self.kept = torch.zeros(3, dtype=torch.float64)
        for each in self.adapted if self._merged else ():
            name, weight = each.item.param, self.weights[each.item.param]
            if name not in self._sources:
                sources = self.layout.sources(each.item, self.rank)
                self._sources[name] = torch.tensor(sources, dtype=torch.long, device=weight.device)
            downs = [self.params[down].float() for down in each.downs]
            added = low_rank_product(downs, self.params[each.up].float(), self._sources[name])
            added *= self.layout.shape.scale
            merged = self._merged[name].copy_(weight.float() + added)
            if merged.dtype != torch.float32 and not merged.is_meta:
                served = merged.float().sub_(weight.float())
                pairs = (added, added), (served, served), (added, served)
                products = [torch.sum(one * other, dtype=torch.float64) for one, other in pairs]
                self.kept = self.kept.to(weight.device) + torch.stack(products)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that a rank holds of adapters besides gradients and the optimizer's state."""
        return [*self.params.values(), *self._merged.values()]


class ReferenceAdapters:
    """A copy of the current adapters, with which the chunks compute within `applied`; see `reference`."""

    def __init__(self, adapters: Adapters) -> None:
        self._params = adapters.params
        self._kept = {name: param.detach().clone() for name, param in adapters.params.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        current = {name: param.data for name, param in self._params.items()}
        try:
            for name, param in self._params.items():
                param.data = self._kept[name]
            yield
        finally:
            for name, param in self._params.items():
                param.data = current[name]


def attach(
    chunks: Sequence[PolicyModel],
    weights: Mapping[str, torch.Tensor],
    layout: AdapterLayout,
    rank: int,
    sequence_parallel: bool,
) -> Adapters:
    """Freezes the weights of the chunks and gives their linear layers adapters, which are not initialised."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:
            # Recomputed layers get no gradients if their input needs none.
            chunk.embedding.register_forward_hook(_needs_gradient)
    by_layer: dict[str, list[Adapted]] = defaultdict(list)
    adapted, shapes = layout.adapted(rank), layout.params(rank)
    for each in adapted:
        by_layer[each.module].append(each)
    params: dict[str, torch.Tensor] = {}
    modules: list[LowRank | LowRankHead] = []
    split_tokens = sequence_parallel and layout.topology.tensor > 1
    for path, of_layer in by_layer.items():
        chunk, _, inner = path.partition(".") if len(chunks) > 1 else ("0", "", path)
        layer = chunks[int(chunk)].get_submodule(inner)
        if isinstance(layer, TargetHead):
            like = next(chunks[int(chunk)].parameters())
            adapter = LowRankHead(of_layer[0], layout, shapes, like, split_tokens)
        else:
            adapter = LowRank(layer, of_layer, layout, rank, shapes, split_tokens)
            if not isinstance(layer, NormedOutput):
                layer.register_forward_hook(_add)
        adapter.path = path
        layer.add_module("adapter", adapter)
        modules.append(adapter)
        params |= {f"{path}.adapter.{name}": param for name, param in adapter.named_parameters()}
    # In the order of the layout, as the model's own.
    params = {name: params[name] for name in shapes}
    set_param_attributes(params, layout, rank, sequence_parallel)
    return Adapters(layout, rank, weights, params, adapted, modules=modules)


def _needs_gradient(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output if output.requires_grad else output.detach().requires_grad_()


def fresh_adapters(layout: AdapterLayout, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """New adapters, as PEFT makes them: ``down`` uniform within 1 / sqrt(in), ``up`` zero. Float32, on the CPU.

    They depend on the seed and the names of projections only, not on the topology.
    """
    return fill_params(layout, rank, fresh_factors(layout.hf_tensors, seed), torch.float32)


def fresh_factors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Read:
    """Reads new factors of these shapes; see `fresh_adapters`."""

    def read(name: str, box: Box) -> torch.Tensor:
        factor = torch.zeros(shapes[name])
        if name.endswith(DOWN):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            bound = 1 / math.sqrt(factor.shape[1])
            factor.uniform_(-bound, bound, generator=generator)
        return box_of(factor, box)

    return read
