"""Converting verl's jagged batches to samples and results back to verl's positions; unsupported options."""

import pytest
import torch

pytest.importorskip("verl.version", reason="verl is not installed; run `bash launch/test.sh`")

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from megasync.errors import TrainingError
from megasync.integrations.verl.batches import VerlBatch, check_batch, temperatures
from megasync.trainer.batch import make_batch

SEQUENCES = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


def jagged(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch_of(sequences=SEQUENCES, responses=None, **options):
    data = TensorDict({"input_ids": jagged(sequences)}, batch_size=len(sequences))
    if responses:
        data["responses"] = jagged(responses)
    tu.assign_non_tensor(data, temperature=1.0, **options)
    return data


def packed(batch, index):
    return make_batch(
        batch.microbatches[index], batch.samples, index=index, multiple=1, device=torch.device("cpu"), flavour="local"
    )


def test_without_responses_every_token_but_the_first_is_scored():
    batch = VerlBatch([batch_of()])
    assert [(list(s.prompt), list(s.response), list(s.scored)) for s in batch.samples] == [
        ([5], [6, 7, 8], [0, 1, 2]),
        ([9], [10], [0]),
        ([11], [12, 13], [0, 1]),
    ]
    found = batch.jagged(packed(batch, 0).targets.float(), packed(batch, 0))
    assert [row.tolist() for row in found.unbind()] == [[6, 7, 8, 0], [10, 0], [12, 13, 0]]


def test_with_responses_only_they_are_scored_and_the_rest_is_zero():
    batch = VerlBatch([batch_of(responses=[[7, 8], [10], [13]])])
    assert packed(batch, 0).targets.tolist() == [7, 8, 10, 13]
    found = batch.jagged(packed(batch, 0).targets.float(), packed(batch, 0))
    assert [row.tolist() for row in found.unbind()] == [[0, 7, 8, 0], [10, 0], [0, 13, 0]]


def test_each_microbatch_maps_to_verls_microbatch():
    parts = [batch_of(SEQUENCES[:1]), batch_of(SEQUENCES[1:])]
    batch = VerlBatch(parts)
    assert [batch.part(packed(batch, index)) is part for index, part in enumerate(parts)] == [True, True]
    assert packed(batch, 1).targets.tolist() == [10, 12, 13]


def test_gradients_reach_the_scores_from_verls_positions():
    batch = VerlBatch([batch_of()])
    scores = torch.arange(6.0, requires_grad=True)
    weights = torch.arange(1.0, 10.0)
    (batch.jagged(scores, packed(batch, 0)).values() * weights).sum().backward()
    assert scores.grad.tolist() == [1, 2, 3, 5, 7, 8]


def test_a_sequence_with_nothing_to_predict_is_refused():
    with pytest.raises(TrainingError, match="1 token has nothing to predict"):
        VerlBatch([batch_of([[5, 6], [7]])])


def test_equal_temperatures_are_one_number():
    data = batch_of()
    assert temperatures(data) == 1.0
    data.pop("temperature")
    data["temperature"] = torch.tensor([0.5, 0.5, 0.5])
    assert temperatures(data) == 0.5
    data["temperature"] = torch.tensor([0.5, 0.5, 0.7])
    assert temperatures(data).tolist() == pytest.approx([0.5, 0.5, 0.7])


@pytest.mark.parametrize(
    "name, value",
    [
        ("calculate_sum_pi_squared", True),
        ("distillation_use_topk", True),
        ("use_fused_kernels", True),
        ("pad_mode", DatasetPadMode.RIGHT),
    ],
)
def test_unsupported_batch_options_are_refused_by_name(name, value):
    check_batch(batch_of())
    with pytest.raises(TrainingError, match=name):
        check_batch(batch_of(**{name: value}))


def test_padded_input_is_refused():
    data = TensorDict({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, batch_size=2)
    with pytest.raises(TrainingError, match="left_right_2_no_padding"):
        check_batch(data)
