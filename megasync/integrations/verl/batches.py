"""Converts verl's batches to samples and microbatches, and per-token results back to verl's jagged tensors.

verl decides what each microbatch contains. Position i of a jagged result is the log-prob of token i + 1, or the value
of the tokens up to i. The last position of a sequence has none and is zero, as are the positions that are never read
(those before the last prompt token).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.model import extract_multi_modal_inputs

from megasync.errors import TrainingError
from megasync.trainer.batch import Batch
from megasync.trainer.packing import Microbatch, Sample, Tree

# Options of a batch that this engine does not support.
REFUSED = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "use_fused_kernels")


class VerlBatch:
    """The microbatches of one call, in the engine's format.

    Raises TrainingError if a sequence has fewer than two tokens.
    """

    def __init__(self, parts: Sequence[TensorDict]) -> None:
        self.samples: list[Sample] = []
        self.microbatches: list[Microbatch] = []
        self._parts: dict[int, TensorDict] = {}
        for part in parts:
            first = len(self.samples)
            self._parts[first] = part
            self.samples += _samples(part)
            trees = (_tree(index, self.samples[index]) for index in range(first, len(self.samples)))
            self.microbatches.append(Microbatch(tuple(trees)))

    def part(self, batch: Batch) -> TensorDict:
        """verl's microbatch that became ``batch``."""
        return self._parts[batch.samples[0]]

    def jagged(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``values`` [targets] of a microbatch as a jagged [sequences, tokens] tensor, placed as verl expects."""
        offsets = _offsets(tensor_at(self.part(batch), "input_ids"))
        rows = []
        for index, end in zip(batch.samples, offsets[1:].tolist(), strict=True):
            rows += range(end - 1 - len(self.samples[index].scored), end - 1)
        flat = values.new_zeros(int(offsets[-1])).index_put((torch.tensor(rows, device=values.device),), values)
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
    sequences = [sequence.tolist() for sequence in tensor_at(part, "input_ids").unbind()]
    samples = []
    for ids, responses in zip(sequences, _responses(part, sequences), strict=True):
        if len(ids) < 2:
            raise TrainingError(f"a sequence of {len(ids)} token has nothing to predict; remove it from the batch")
        prompt = len(ids) - responses
        samples.append(Sample(ids[:prompt], ids[prompt:], range(responses)))
    return samples


def _responses(part: TensorDict, sequences: list[list[int]]) -> list[int]:
    """Number of tokens at the end of each sequence to score: the response, or all but the first token."""
    if "responses" not in part:
        return [len(ids) - 1 for ids in sequences]
    responses = tensor_at(part, "responses")
    if responses.is_nested:
        return _offsets(responses).diff().tolist()
    return part["attention_mask"][:, -responses.shape[1] :].sum(dim=1).tolist()


def _offsets(jagged: torch.Tensor) -> torch.Tensor:
    return jagged.offsets()  # pyright: ignore[reportAttributeAccessIssue] - declared on nested tensors only


def _tree(index: int, sample: Sample) -> Tree:
    """One tree per sequence. Its work is irrelevant, because verl has already assigned it to a rank."""
    return Tree(sample.prompt, (index,), len(sample.prompt) + sample.fed, work=0.0)
