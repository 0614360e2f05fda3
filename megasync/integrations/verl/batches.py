"""verl's batches as megasync's samples and microbatches, and per-token results back as verl's jagged tensors.

verl decides what is in a microbatch. Position i of a jagged result belongs to the log-prob of token i + 1, or is the value
of what stands before it. So the last position of a sequence has none; it is zero, as are the positions that nobody reads
(those before the last of a prompt).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.model import extract_multi_modal_inputs

from megasync.errors import TrainingError
from megasync.trainer.batch import Batch
from megasync.trainer.packing import Microbatch, Sample, Tree

# What a batch may ask for that this engine does not compute.
REFUSED = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "use_fused_kernels")


class VerlBatch:
    """The microbatches of one call, as the engine wants them.

    Raises:
        TrainingError: a batch that asks for something this engine does not compute, or a sequence of one token.
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
        """What verl put into the microbatch that became ``batch``."""
        return self._parts[batch.samples[0]]

    def jagged(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``values`` [targets] of a microbatch where verl looks for them, as a jagged [sequences, tokens] tensor."""
        offsets = self.part(batch)["input_ids"].offsets()
        rows = []
        for index, end in zip(batch.samples, offsets[1:].tolist(), strict=True):
            rows += range(end - 1 - len(self.samples[index].scored), end - 1)
        flat = values.new_zeros(int(offsets[-1])).index_put((torch.tensor(rows, device=values.device),), values)
        return torch.nested.nested_tensor_from_jagged(flat, offsets=offsets)


def check_batch(data: TensorDict) -> None:
    """Raises TrainingError, as `VerlBatch`."""
    for key in REFUSED:
        if tu.get_non_tensor_data(data, key=key, default=False):
            raise TrainingError(f"the batch asks for {key}, which megasync's engine does not support")
    pad_mode = tu.get_non_tensor_data(data, key="pad_mode", default=DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING:
        raise TrainingError(f"the batch's pad_mode is {pad_mode}; megasync's engine takes {DatasetPadMode.NO_PADDING}")
    if extract_multi_modal_inputs(data.get("multi_modal_inputs", [])):
        raise TrainingError("the batch has multi_modal_inputs; megasync's engine takes text only")
    if not data["input_ids"].is_nested:
        raise TrainingError("the batch's input_ids are padded; verl's left_right_2_no_padding makes them jagged")


def temperatures(part: TensorDict) -> float | torch.Tensor:
    """One temperature for all sequences, or [sequences] when they differ."""
    found = part["temperature"]
    if not isinstance(found, torch.Tensor):
        return float(found)
    return float(found.flatten()[0]) if bool((found == found.flatten()[0]).all()) else found.float()


def _samples(part: TensorDict) -> list[Sample]:
    sequences = [sequence.tolist() for sequence in part["input_ids"].unbind()]
    found = []
    for ids, responses in zip(sequences, _responses(part, sequences), strict=True):
        if len(ids) < 2:
            raise TrainingError(f"a sequence of {len(ids)} token has nothing to predict; leave it out of the batch")
        prompt = len(ids) - responses
        found.append(Sample(ids[:prompt], ids[prompt:], range(responses)))
    return found


def _responses(part: TensorDict, sequences: list[list[int]]) -> list[int]:
    """Tokens at the end of each sequence whose log-probs are wanted: the response, or all but the first token."""
    if "responses" not in part:
        return [len(ids) - 1 for ids in sequences]
    responses = part["responses"]
    if responses.is_nested:
        return responses.offsets().diff().tolist()
    return part["attention_mask"][:, -responses.shape[1] :].sum(dim=1).tolist()


def _tree(index: int, sample: Sample) -> Tree:
    """A tree of its own for each sequence; its work, by which trees are dealt, does not matter any more."""
    return Tree(sample.prompt, (index,), len(sample.prompt) + sample.fed, work=0.0)
