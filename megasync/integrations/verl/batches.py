"""Converts verl's batches to samples and microbatches, and per-token results back to verl's jagged tensors.

verl decides what each microbatch contains. Position i of a jagged result is the log-prob of token i + 1, or the value
of the tokens up to i. The last position of a sequence has none and is zero, as are the positions that are never read
(those before the last prompt token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.model import extract_multi_modal_inputs

from megasync.errors import TrainingError, raised_as
from megasync.layout.routes import RouteArray, RouteFormat
from megasync.trainer.batch import Batch, Sample
from megasync.trainer.packing import Microbatch

# Options of a batch that this engine does not support.
REFUSED = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "use_fused_kernels")


class VerlBatch:
    """The microbatches of one call, in the engine's format.

    ``form`` is that of the model's routes, None without experts. Raises TrainingError if a sequence has fewer than two
    tokens, or lacks routes that are to be replayed.
    """

    def __init__(self, parts: Sequence[TensorDict], form: RouteFormat | None = None) -> None:
        self.samples: list[Sample] = []
        self.microbatches: list[Microbatch] = []
        self._parts = list(parts)
        for part in parts:
            first = len(self.samples)
            self.samples += _samples(part, form)
            # One tree per sequence.
            trees = tuple((index,) for index in range(first, len(self.samples)))
            tokens = sum(len(sample.prompt) + sample.response_inputs for sample in self.samples[first:])
            self.microbatches.append(Microbatch(trees, tokens))

    def part(self, batch: Batch) -> TensorDict:
        """verl's microbatch that became ``batch``."""
        return self._parts[batch.index]

    def jagged(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``values`` [targets] of a microbatch as a jagged [sequences, tokens] tensor, placed as verl expects."""
        offsets = _offsets(tensor_at(self.part(batch), "input_ids"))
        # Of each sequence, the last position but one is that of its last target.
        counts = torch.tensor(batch.counts, device=values.device)
        shifts = offsets[1:] - 1 - counts.cumsum(0)
        rows = torch.arange(len(values), device=values.device) + shifts.repeat_interleave(counts)
        flat = values.new_zeros(int(offsets[-1])).index_put((rows,), values)
        return torch.nested.nested_tensor_from_jagged(flat, offsets=offsets)


def check_batch(data: TensorDict) -> None:
    """Raises TrainingError for a batch that this engine does not support."""
    for key in REFUSED:
        if tu.get_non_tensor_data(data, key=key, default=False):
            raise TrainingError(f"the batch sets {key}, which megasync's engine does not support")
    pad_mode = tu.get_non_tensor_data(data, key="pad_mode", default=DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING:
        raise TrainingError(
            f"the batch's pad_mode is {pad_mode}; megasync's engine supports {DatasetPadMode.NO_PADDING}"
        )
    if extract_multi_modal_inputs(data.get("multi_modal_inputs", [])):
        raise TrainingError("the batch has multi_modal_inputs; megasync's engine supports text only")
    if not data["input_ids"].is_nested:
        raise TrainingError("the batch's input_ids are padded; verl's left_right_2_no_padding makes them jagged")


def tensor_at(data: TensorDict, key: str) -> torch.Tensor:
    """An entry that is a tensor; tensordict declares everything that it can hold."""
    return cast("torch.Tensor", data[key])


def temperatures(part: TensorDict) -> float | torch.Tensor:
    """One temperature for all sequences, or [sequences] if they differ."""
    temperature: Any = part["temperature"]
    if not isinstance(temperature, torch.Tensor):
        return float(temperature)
    first = temperature.flatten()[0]
    return float(first) if bool((temperature == first).all()) else temperature.float()


def _samples(part: TensorDict, form: RouteFormat | None) -> list[Sample]:
    ids, offsets = tensor_at(part, "input_ids").values().cpu().numpy(), _offsets(tensor_at(part, "input_ids")).tolist()
    sequences = [ids[start:end] for start, end in pairwise(offsets)]
    samples = []
    for ids, responses, routes in zip(sequences, _responses(part, sequences), _routes(part, form), strict=True):
        if len(ids) < 2:
            raise TrainingError(f"a sequence of {len(ids)} token has nothing to predict; remove it from the batch")
        # Of an empty response the last prompt token is scored: verl never reads it, and every sample needs a target.
        prompt = len(ids) - max(1, responses)
        samples.append(replace(Sample.of(ids[:prompt], ids[prompt:]), routes=routes))
    return samples


def _routes(part: TensorDict, form: RouteFormat | None) -> list[RouteArray] | list[None]:
    """Those of each sequence, where verl wants them replayed: in the actor's passes, with `router_replay.mode=R3`."""
    if not tu.get_non_tensor_data(part, key="enable_routing_replay", default=False):
        return [None] * len(part)
    if form is None:
        raise TrainingError("router_replay.mode=R3 replays routes, but the model has no experts; set it to disabled")
    if "routed_experts" not in part:
        raise TrainingError(
            "router_replay.mode=R3 needs the routes of the rollout, and the batch has no routed_experts; set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=true"
        )
    mask, arrays = tensor_at(part, "loss_mask"), []
    for row, counted in zip(tensor_at(part, "routed_experts").unbind(), mask.unbind(), strict=True):
        # The last token is not fed; servers report no routes of it, and verl fills them up.
        routes = row[:-1].cpu().numpy()
        if not counted.any():
            # A sequence that fills up the batch, without routes.
            routes = np.broadcast_to(np.arange(form.per_token), routes.shape)
        fix = "with router_replay.mode=R3, each token but the last needs its routes"
        with raised_as(TrainingError, f"routed_experts of a sequence of {len(row)} tokens", fix, of=ValueError):
            arrays.append(form.checked(routes))
    return arrays


def _responses(part: TensorDict, sequences: Sequence[NDArray[Any]]) -> list[int]:
    """Number of tokens at the end of each sequence to score: the response, or all but the first token."""
    if "responses" not in part:
        return [len(ids) - 1 for ids in sequences]
    responses = tensor_at(part, "responses")
    if responses.is_nested:
        return _offsets(responses).diff().tolist()
    return part["attention_mask"][:, -responses.shape[1] :].sum(dim=1).tolist()


def _offsets(jagged: torch.Tensor) -> torch.Tensor:
    return jagged.offsets()  # pyright: ignore[reportAttributeAccessIssue] - declared on nested tensors only
