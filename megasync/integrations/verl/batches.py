"""Converts verl's batches to samples and microbatches, and per-token results back to verl's jagged tensors.

verl decides what each microbatch contains. Position i of a jagged result is the log-prob of token i + 1, or the value
of the tokens up to i. The last position of a sequence has none and is zero, as are the positions that are never read
(those before the last prompt token).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.model import extract_multi_modal_inputs

from megasync.errors import TrainingError
from megasync.trainer.batch import Batch, Sample
from megasync.trainer.packing import Microbatch

# Options of a batch that this engine does not support.
REFUSED = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "use_fused_kernels")


class VerlBatch:
    """The microbatches of one call, in the engine's format.

    Raises TrainingError if a sequence has fewer than two tokens.
    """

    def __init__(self, parts: Sequence[TensorDict]) -> None:
        self.samples: list[Sample] = []
        self.microbatches: list[Microbatch] = []
        self._parts = list(parts)
        for part in parts:
            first = len(self.samples)
            self.samples += _samples(part)
            # One tree per sequence.
            trees = tuple((index,) for index in range(first, len(self.samples)))
            tokens = sum(len(sample.prompt) + sample.fed for sample in self.samples[first:])
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


def _samples(part: TensorDict) -> list[Sample]:
    ids, offsets = tensor_at(part, "input_ids").values().cpu().numpy(), _offsets(tensor_at(part, "input_ids")).tolist()
    sequences = [ids[start:end] for start, end in pairwise(offsets)]
    samples = []
    for ids, responses in zip(sequences, _responses(part, sequences), strict=True):
        if len(ids) < 2:
            raise TrainingError(f"a sequence of {len(ids)} token has nothing to predict; remove it from the batch")
        prompt = len(ids) - responses
        samples.append(Sample.of(ids[:prompt], ids[prompt:]))
    return samples


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
