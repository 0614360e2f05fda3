"""Many models on the same ranks: the adapters of one at a time are those of the learner, the others are on the host.

A model is its adapters with float32 copies, gradients, Adam's moments and the number of its steps. All of it is in the
learner while the model is active, and in (pinned) host memory otherwise; only a call for another model swaps them. So
a model computes exactly what it would alone.

Passes of several models that fit into one microbatch are computed together, with no swap: the frozen layers take the
tokens of all, and each model's adapters, attention and loss its own. No sum is over the tokens of two models, so what
is not finite in one stays there. A row of a matrix product is the same bit for bit in products of any number of rows,
from `ROWS` of each thread on; that is measured, of torch's products on CPUs, and checked by the tests.

The learner has adapters of one rank on all projections. A model of a smaller rank, or with fewer projections, has zero
rows and columns there. They stay exactly zero: the gradient of a row of ``down`` is a product with a column of ``up``
and the other way round, Adam makes no step of a zero gradient with zero moments, and weight decay multiplies.

Gradients are summed over passes. Each pass is reduced over ranks by itself, in buffers that begin with zero, and then
added to those before it, so their sum does not depend on what other models do in between.

    <folder>/adapter_config.json, adapter_model.safetensors     PEFT's files; the factors are float32
    <folder>/optimizer.safetensors                              Adam's moments, under the names of the factors
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megasync.device import synchronize
from megasync.errors import MegasyncError, TrainingError
from megasync.layout.adapter import AdapterLayout, AdapterShape
from megasync.layout.layout import Layout
from megasync.layout.shards import Read, assemble, fill_params
from megasync.layout.topology import Topology
from megasync.observe import trace
from megasync.tenants.passes import TOGETHER, LossPass, PassPart, shared_prefixes
from megasync.tenants.saved_adapter import AdapterFiles, SavedAdapter, padded
from megasync.tenants.sum_losses import LOSSES
from megasync.trainer.adam import Adam
from megasync.trainer.adapters import Member, fresh_factors
from megasync.trainer.architecture import full_microbatch, token_multiple
from megasync.trainer.batch import Batch, Sample
from megasync.trainer.checkpoint import MAIN_WEIGHT, MOMENTS, Slice, run_collectively, slice_peers
from megasync.trainer.learner import LocalBatch, MegatronLearner
from megasync.trainer.optimizer import Update
from megasync.trainer.packing import Ints, Lengths, Microbatch

# On a CPU, products of fewer rows for each thread than this may round otherwise. Seen below 6.
ROWS = 16

# Of what a rank contributes to a saved model: by kind and parameter the element at which its values begin, and these.
Contribution = dict[str, dict[str, tuple[int, NDArray[np.float32]]]]


@dataclass
class _Model:
    """The state of a model on one rank. While the model is active, that of the learner is newer."""

    shape: AdapterShape
    # In the dtype of the model.
    params: dict[str, torch.Tensor]
    slices: dict[str, Slice]
    updates: int = 0
    # Like `MegatronLearner.gradient_buffers`; empty without gradients.
    gradients: list[torch.Tensor] = field(default_factory=list[torch.Tensor])


@dataclass(frozen=True)
class _Planned:
    """A pass, and the microbatches that this rank computes of it.

    ``most`` are the tokens of the largest one of all ranks; ``together`` tells whether it may share one.
    """

    model: str
    work: LossPass
    microbatches: Sequence[Microbatch]
    shared: Sequence[_SharedTargets]
    counted_tokens: int
    most: int
    together: bool

    def inputs(self, index: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The columns that the loss reads at the targets of a microbatch, on ``device``."""
        starts, sequences = self.work.target_starts, self.microbatches[index].sequences
        columns = {
            name: np.concatenate([column[starts[i] : starts[i + 1]] for i in sequences])
            for name, column in self.work.inputs.items()
        }
        return {name: torch.from_numpy(column).to(device) for name, column in columns.items()}


class AdapterBank:
    """The models of one rank; every method is a collective.

    The adapters of ``learner`` bound the rank and the projections of all models. Methods raise TrainingError for a
    model that is not there.
    """

    def __init__(self, learner: MegatronLearner) -> None:
        layout = learner.trained_layout
        assert isinstance(layout, AdapterLayout), "a learner of all weights has no adapters to swap"
        self._learner = learner
        self._layout = layout
        self._device = learner.device.torch_device
        self._shapes = cache(layout.params)
        self._writers = layout.writers(learner.rank)
        self._peers = slice_peers(layout, learner.optimizer.sharded)
        self._alone = cache(self._adapters_alone)
        self._models: dict[str, _Model] = {}
        self._active: str | None = None
        self._least = self._least_together()
        # Of the active model: whether the learner's state differs from that on the host, and has gradients.
        self._changed = self._has_gradients = False

    def create(self, model: str, shape: AdapterShape, seed: int) -> None:
        """Makes new adapters, in place of those that the model may have."""
        factors = self._alone(shape).hf_tensors
        self._put(model, shape, self._params(fresh_factors(factors, seed), shape), {}, 0)

    def unload(self, model: str) -> None:
        """Forgets a model, if it is there."""
        if self._active == model:
            self._active = None
        self._models.pop(model, None)

    # State

    def _adapters_alone(self, shape: AdapterShape) -> AdapterLayout:
        """The adapters of a model on a single rank."""
        return AdapterLayout(Layout(self._layout.hf_config, Topology()), shape)

    def _params(self, read: Read, shape: AdapterShape) -> dict[str, torch.Tensor]:
        """This rank's parameters of a model whose factors, of its own shape, ``read`` reads; float32."""
        read = padded(read, self._alone(shape).hf_tensors)
        return fill_params(self._layout, self._learner.rank, read, torch.float32)

    def _put(
        self,
        model: str,
        shape: AdapterShape,
        params: Mapping[str, torch.Tensor],
        moments: Mapping[str, Mapping[str, torch.Tensor]],
        updates: int,
    ) -> None:
        """Keeps a model of these float32 parameters, with the moments of each by their names."""
        learner = self._learner
        kinds = dict(moments) if learner.dtype == torch.float32 else {**moments, MAIN_WEIGHT: params}
        ranges = learner.optimizer.ranges(learner.trained)
        slices = {
            name: Slice(held.start, {kind: of[name].view(-1)[held.start : held.stop] for kind, of in kinds.items()})
            for name, held in ranges.items()
        }
        cast = {name: param.to(learner.dtype) for name, param in params.items()}
        self.unload(model)
        self._models[model] = self._on_host(_Model(shape, cast, slices, updates))

    def _on_host(self, model: _Model) -> _Model:
        copy = self._host_copy
        copied = _Model(
            model.shape,
            {name: copy(param) for name, param in model.params.items()},
            {name: held.copied(copy) for name, held in model.slices.items()},
            model.updates,
            [copy(buffer) for buffer in model.gradients],
        )
        synchronize(self._device)
        return copied

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        return memory.copy_(tensor.detach(), non_blocking=True)

    def _kept(self, model: str) -> _Model:
        if model not in self._models:
            raise TrainingError(f"there is no model {model!r} on the trainer ranks; create or load it first")
        return self._models[model]

    def _state(self, model: str) -> _Model:
        """The present state of a model; of the active one the learner's own tensors."""
        kept, learner = self._kept(model), self._learner
        if model != self._active or not self._changed:
            return kept
        learner.gather_weights()
        params = {name: param.data for name, param in learner.trained.items()}
        gradients = learner.gradient_buffers() if self._has_gradients else []
        return _Model(
            kept.shape, params, learner.optimizer.slices(learner.trained), learner.optimizer.updates, gradients
        )

    def _activate(self, model: str) -> None:
        state = self._state(model)
        if model == self._active:
            return
        with trace.span("rank", "swap"):
            self._park()
            learner = self._learner
            learner.gather_weights()
            learner.write(state.params)
            learner.optimizer.reload_weights()
            learner.optimizer.restore(learner.trained, state.slices, state.updates)
            learner.adapters.set_scale(state.shape.scale)
            learner.zero_grad()
            for buffer, kept in zip(learner.gradient_buffers(), state.gradients, strict=bool(state.gradients)):
                buffer.copy_(kept)
        self._active, self._changed, self._has_gradients = model, False, bool(state.gradients)

    def _park(self) -> None:
        """Brings the state of the active model to the host; the learner has none then."""
        if self._active is not None and self._changed:
            self._models[self._active] = self._on_host(self._state(self._active))
        self._active, self._changed, self._has_gradients = None, False, False

    # Training

    def compute(self, passes: Sequence[tuple[str, LossPass]]) -> list[PassPart | MegasyncError]:
        """Computes passes of several models, those of each in their order. What is wrong with one is its result."""
        results: dict[int, PassPart | MegasyncError] = {}
        batch: dict[int, _Planned] = {}

        def finish() -> None:
            if len(batch) > 1:
                results.update(zip(batch, self._compute_together([*batch.values()]), strict=True))
            else:
                results.update({place: self._compute(only) for place, only in batch.items()})
            batch.clear()

        room = full_microbatch(self._learner.trainer_config)
        for place, (model, work) in enumerate(passes):
            try:
                # Each rank finds the same before it computes anything.
                self._kept(model)
                planned = self._plan(model, work)
            except MegasyncError as error:
                results[place] = error
                continue
            others = [*batch.values()]
            fits = sum(each.most for each in (*others, planned)) <= room and len(others) < TOGETHER
            alike = all(each.together and each.work.backward == work.backward for each in (*others, planned))
            if others and not (fits and alike and all(each.model != model for each in others)):
                finish()
            batch[place] = planned
        finish()
        return [results[place] for place in range(len(passes))]

    def _least_together(self) -> int | None:
        """The tokens that a pass needs on each rank to be computed with others; None if none ever is."""
        learner = self._learner
        trainer, topology = learner.trainer_config, learner.topology
        apart = (
            topology.context > 1
            or learner.layout.sizes.experts
            or learner.layout.sizes.delta
            or trainer.fp8
            or trainer.pad_microbatches
            or trainer.cuda_graphs
            or trainer.overlap_grad_reduce
            or trainer.overlap_param_gather
        )
        if apart:
            return None
        if self._device.type != "cpu":
            return 1
        # Sums over more than two ranks depend on where a number is in its message, and sums over tokens on their split.
        exact = topology.tensor <= 2 and not trainer.sequence_parallel
        return ROWS * torch.get_num_threads() if exact else None

    def _plan(self, model: str, work: LossPass) -> _Planned:
        prompts, prompt_tokens = shared_prefixes(work.sequences)
        packing = self._learner.plan(Lengths(prompts, prompt_tokens, work.lengths - prompt_tokens))
        microbatches = self._learner.own_microbatches(packing)
        shared = [_SharedTargets.of(work, each, prompt_tokens) for each in microbatches]
        tokens = packing.tokens[packing.table]
        small = tokens.shape[1] == 1 and self._least is not None and int(tokens.min()) >= self._least
        return _Planned(model, work, microbatches, shared, packing.counted_tokens, int(tokens.max()), small)

    def _losses(
        self, planned: _Planned, index: int, hidden: torch.Tensor, part: Batch
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The loss of a microbatch of a pass, its log-probs, and the sum that is reported."""
        logprobs, _ = self._learner.score_rows(hidden, part, 1.0)
        places, segments = (torch.from_numpy(each).to(self._device) for each in planned.shared[index].columns)
        if len(places) > len(logprobs):
            logprobs = logprobs[places]
        losses = LOSSES[planned.work.loss].compute(logprobs, planned.inputs(index, self._device), segments)
        # A masked copy only keeps a rank in step with others.
        counted = float(planned.microbatches[index].counted)
        return losses.sum() * counted, (logprobs.detach(), losses.detach().sum(dtype=torch.float64))

    def _compute(self, planned: _Planned) -> PassPart:
        learner, work = self._learner, planned.work
        self._activate(planned.model)
        samples = {index: sample for each in planned.shared for index, sample in each.samples.items()}
        batch = LocalBatch(planned.microbatches, samples, planned.counted_tokens)

        def evaluate(part: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return self._losses(planned, part.index, hidden, part)

        name = "forward_backward" if work.backward else "forward"
        with trace.span("rank", name, microbatches=len(planned.microbatches)):
            if not work.backward:
                with torch.no_grad():
                    reports = learner.run(batch, evaluate, forward_only=True)
            else:
                earlier = [buffer.clone() for buffer in learner.gradient_buffers()] if self._has_gradients else []
                learner.zero_grad()
                reports = learner.run(batch, evaluate, forward_only=False)
                for buffer, sums in zip(learner.gradient_buffers(), earlier, strict=bool(earlier)):
                    buffer.add_(sums)
                self._changed = self._has_gradients = True
        return self._part(planned, reports)

    def _compute_together(self, passes: Sequence[_Planned]) -> list[PassPart]:
        """Computes the only microbatches of passes of different models as one."""
        learner, backward = self._learner, passes[0].work.backward
        self._park()
        samples: dict[int, Sample] = {}
        trees: list[tuple[int, ...]] = []
        owners: list[int] = []
        counts: list[int] = []
        first = 0
        for number, each in enumerate(passes):
            (own,), (shared,) = each.microbatches, each.shared
            samples |= {first + index: sample for index, sample in shared.samples.items()}
            trees += [tuple(first + index for index in tree) for tree in own.trees]
            owners += [number] * len(own.trees)
            counts.append(sum(len(shared.samples[index].scored) for index in own.sequences))
            first += len(each.work.lengths)
        tokens = [each.microbatches[0].tokens for each in passes]
        joint = Microbatch(tuple(trees), sum(tokens), owners=tuple(owners))
        # Padding, which has no gradients, counts to the last.
        tokens[-1] += -sum(tokens) % token_multiple(learner.trainer_config)
        batch = LocalBatch([joint], samples, sum(each.counted_tokens for each in passes))
        size = sum(tokens) // learner.topology.tensor
        ends = np.clip(np.cumsum([0, *tokens]) - size * learner.coords.tp, 0, size)
        counts_of = zip(passes, tokens, np.diff(ends).tolist(), strict=True)
        members = [self._member(each.model, all_tokens, own, backward) for each, all_tokens, own in counts_of]

        def evaluate(part: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
            losses: list[torch.Tensor] = []
            reports: list[Any] = []
            parts = zip(passes, members, hidden.split(counts), part.targets.split(counts), strict=True)
            for each, member, rows, targets in parts:
                learner.adapters.score_for(member)
                loss, report = self._losses(each, 0, rows, replace(part, targets=targets))
                losses.append(loss)
                reports.append(report)
            return torch.stack(losses).sum(), reports

        name = "forward_backward" if backward else "forward"
        with trace.span("rank", name, microbatches=1, models=len(passes)), learner.adapters.computing_for(members):
            learner.zero_grad()
            with nullcontext() if backward else torch.no_grad():
                reports = learner.run(batch, evaluate, forward_only=not backward)
            if backward:
                for each, member in zip(passes, members, strict=True):
                    self._add_gradients(self._models[each.model], member)
        of_each = reports[0] if reports else [None] * len(passes)
        return [self._part(each, [report]) for each, report in zip(passes, of_each, strict=True)]

    def _member(self, model: str, tokens: int, own_tokens: int, backward: bool) -> Member:
        kept = self._models[model]
        params = {
            name: param.to(self._device, non_blocking=True).detach().requires_grad_(backward)
            for name, param in kept.params.items()
        }
        return Member(tokens, own_tokens, kept.shape.scale, params)

    def _add_gradients(self, model: _Model, member: Member) -> None:
        """Reduces what a microbatch has computed for a model, and adds it to the model's gradients on the host."""
        learner = self._learner
        learner.zero_grad()
        for name, param in learner.trained.items():
            if (grad := member.params[name].grad) is not None:
                # Megatron adds it to a view of its buffers.
                param.main_grad.add_(grad)  # pyright: ignore[reportAttributeAccessIssue]
        learner.reduce_gradients()
        buffers = learner.gradient_buffers()
        for buffer, sums in zip(buffers, model.gradients, strict=bool(model.gradients)):
            buffer.add_(sums.to(self._device))
        model.gradients = [self._host_copy(buffer) for buffer in buffers]
        synchronize(self._device)

    def _part(self, planned: _Planned, reports: Sequence[Any]) -> PassPart:
        """The results of a pass on this rank, from the log-probs and the sum of each microbatch."""
        learner, work = self._learner, planned.work
        if not learner.is_last_stage or learner.coords.tp or learner.coords.cp:
            return PassPart((), (), {})
        pairs = zip(planned.microbatches, reports, strict=True)
        counted = [(each.sequences, report) for each, report in pairs if each.counted]
        widths = work.lengths * work.widths
        logprobs = [
            part.numpy()
            for sequences, (values, _) in counted
            for part in values.cpu().split([int(widths[index]) for index in sequences])
        ]
        total = sum(float(value) for _, (_, value) in counted)
        return PassPart(tuple(i for sequences, _ in counted for i in sequences), tuple(logprobs), {"loss": total})

    def update(self, model: str, adam: Adam) -> Update:
        """Takes an optimizer step with the gradients of a model and drops them; none count as zero.

        Nothing but the gradients changes if they are not finite on any rank.
        """
        self._activate(model)
        if not self._has_gradients:
            self._learner.zero_grad()
        update = self._learner.update(adam)
        self._changed, self._has_gradients = True, False
        return update

    # Files

    def copied(self, model: str, moments: bool) -> SavedAdapter | None:
        """Copies a model's adapters, and Adam's ``moments`` if asked for; the first rank returns those of all ranks."""
        state = self._state(model)
        with trace.span("rank", "copy"):
            parts = self._gather(self._contribution(state, moments))
            return self._whole(state, moments, parts) if parts else None

    def _gather(self, part: Contribution) -> list[Contribution]:
        """The first rank gets the contributions of all, others get none. Ranks that hold copies send nothing."""
        if dist.get_world_size() == 1:
            return [part]
        held = [(kind, name, *each) for kind, of_kind in part.items() for name, each in of_kind.items()]
        places = [(kind, name, start, len(values)) for kind, name, start, values in held]
        text = torch.from_numpy(np.frombuffer(json.dumps(places).encode() if held else b"", np.uint8).copy())
        values = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *(values for *_, values in held)]))
        both = _gather_on_first(text, self._device), _gather_on_first(values, self._device)
        return [_split(list(part), text, values) for text, values in zip(*both, strict=True)]

    def _contribution(self, state: _Model, moments: bool) -> Contribution:
        """This rank contributes what it is the first to hold: float32 adapters, and moments if they are asked for."""
        rank, writers = self._learner.rank, self._writers
        kinds = {kind: kind for kind in MOMENTS if moments and state.updates}
        parts: Contribution = {kind: {} for kind in (MAIN_WEIGHT, *kinds)}
        if self._learner.dtype == torch.float32:
            whole = {name: param for name, param in state.params.items() if writers[name] == rank}
            parts[MAIN_WEIGHT] = {name: (0, _vector(param)) for name, param in whole.items()}
        else:
            kinds[MAIN_WEIGHT] = MAIN_WEIGHT
        for name, (start, tensors, made) in state.slices.items():
            if rank in self._peers(writers[name], name):
                for kind in kinds:
                    parts[kind][name] = start, _vector(tensors[kind] if kind in tensors else made[kind]())
        return parts

    def _whole(self, state: _Model, moments: bool, gathered: Sequence[Contribution]) -> SavedAdapter:
        layout, small = self._layout, self._alone(state.shape)

        @cache
        def whole(kind: str, rank: int, param: str) -> torch.Tensor:
            shape = self._shapes(rank)[param]
            values = torch.empty(prod(shape))
            for peer in self._peers(rank, param):
                if held := gathered[peer][kind].get(param):
                    start, part = held
                    values[start : start + len(part)] = torch.from_numpy(part)
            return values.view(shape)

        kinds = {
            kind: {
                name: assemble(name, layout, partial(whole, kind))[: shape[0], : shape[1]].contiguous().numpy()
                for name, shape in small.hf_tensors.items()
            }
            for kind in gathered[0]
        }
        factors = kinds.pop(MAIN_WEIGHT)
        path = str(self._learner.model_config.path)
        return SavedAdapter(state.shape, path, factors, kinds if moments else None, state.updates)

    def load(self, model: str, shape: AdapterShape, folder: Path, moments: bool) -> None:
        """Makes a model what a `SavedAdapter` has written, of ranks of any topology; its gradients are gone.

        Without ``moments`` Adam begins anew. Raises CheckpointError on every rank for a folder of other adapters, one
        that is damaged, and one without moments if these are asked for; the model is then as before.
        """
        params: dict[str, torch.Tensor] = {}
        kinds: dict[str, dict[str, torch.Tensor]] = {}
        updates = 0

        def read() -> None:
            nonlocal updates
            with AdapterFiles(folder, self._alone(shape)) as files:
                params.update(self._params(files.factors(), shape))
                updates = files.updates() if moments else 0
                if updates:
                    kinds.update({kind: self._params(files.moments(kind), shape) for kind in MOMENTS})

        run_collectively(read, "read", folder, self._device)
        self._put(model, shape, params, kinds, updates)


def _gather_on_first(values: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Gathers a vector of each rank, of any length but one dtype, in host memory of rank 0; empty on other ranks.

    A rank without values sends nothing, so only what is there takes memory and time.
    """
    rank = dist.get_rank()
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    lengths[rank] = len(values)
    dist.all_reduce(lengths)
    if rank:
        if len(values):
            dist.send(values.to(device), 0)
        return []
    gathered = [values]
    for source, length in enumerate(lengths.tolist()[1:], start=1):
        received = torch.empty(length, dtype=values.dtype, device=device)
        if length:
            dist.recv(received, source)
        gathered.append(received.cpu())
    return gathered


def _vector(values: torch.Tensor) -> NDArray[np.float32]:
    return values.detach().float().reshape(-1).cpu().numpy()


def _split(kinds: Sequence[str], places: torch.Tensor, values: torch.Tensor) -> Contribution:
    """A rank's contribution, from the places and values that it sent."""
    part: Contribution = {kind: {} for kind in kinds}
    end = 0
    for kind, name, start, count in json.loads(places.numpy().tobytes() or "[]"):
        part[kind][name] = start, values[end : end + count].numpy()
        end += count
    return part


class _SharedTargets(NamedTuple):
    """The samples of a microbatch, without targets that they have in common with the first of their tree."""

    samples: dict[int, Sample]
    # Of each target of all sequences: where its log-prob is among those of the samples; and the place of its sequence
    # in the microbatch. int64 [targets].
    columns: tuple[Ints, Ints]

    @classmethod
    def of(cls, work: LossPass, microbatch: Microbatch, prompt_tokens: Ints) -> _SharedTargets:
        samples: dict[int, Sample] = {}
        places: list[Ints] = []
        scored = 0
        for tree in microbatch.trees:
            first = len(places)
            for index in tree:
                tokens, targets, width = work.sequences[index], work.targets_of(index), int(work.widths[index])
                positions, prompt = np.repeat(np.arange(len(tokens)), width), int(prompt_tokens[index])
                own, place = np.ones(len(targets), dtype=bool), np.zeros(len(targets), dtype=np.int64)
                if index != tree[0] and width == work.widths[tree[0]]:
                    # The hidden states of the prompt are those of all.
                    common = prompt * width
                    own[:common] = targets[:common] != work.targets_of(tree[0])[:common]
                    place[:common] = places[first][:common]
                place[own] = scored + np.arange(own.sum())
                scored += int(own.sum())
                places.append(place)
                offsets = (positions - prompt + 1)[own]
                inputs = len(tokens) - prompt
                samples[index] = Sample(tokens[:prompt], tokens[prompt:], offsets, inputs, targets=targets[own])
        segments = np.repeat(np.arange(len(places)), [len(place) for place in places])
        return cls(samples, (np.concatenate(places), segments))
