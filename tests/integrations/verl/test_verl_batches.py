"""Converting verl's jagged batches to samples and results back to verl's positions; unsupported options."""

import pytest
import torch

pytest.importorskip("verl.version", reason="verl is not installed; run `megasync install verl`")

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from megasync.errors import TrainingError
from megasync.integrations.verl.batches import VerlBatch, check_batch, temperatures
from megasync.layout.routes import RouteFormat
from megasync.trainer.batch import make_batch

SEQUENCES = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


def jagged(rows):
    rows = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


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


@pytest.mark.parametrize("responses", [[[7, 8], [], [13]], [[], [], []]])
def test_an_empty_response_gets_no_value_that_verl_reads(responses):
    batch = VerlBatch([batch_of(responses=responses)])
    targets = packed(batch, 0).targets.float()
    found = batch.jagged(targets, packed(batch, 0)).unbind()
    assert [len(row) for row in found] == [len(ids) for ids in SEQUENCES]
    for row, ids, response in zip(found, SEQUENCES, responses, strict=True):
        first = len(ids) - len(response) - 1
        assert row[first:-1].tolist() == response


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


FORM = RouteFormat(layers=2, sparse=(1,), per_token=2, experts=4)


def routed_batch(routes, counted=(1, 1, 1), **options):
    """Routes [tokens, layers, experts] of each sequence; ``counted`` says which sequences are trained."""
    data = batch_of(enable_routing_replay=True, **options)
    data["loss_mask"] = jagged([[count] * len(ids) for count, ids in zip(counted, SEQUENCES, strict=True)])
    data["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    return data


def routes_of(lengths=(4, 2, 3)):
    """Experts (3, 0) in the layer without experts, (1, 2) in the other; verl's zeros at the last token."""
    routes = [torch.tensor([[[3, 0], [1, 2]]]).repeat(length, 1, 1) for length in lengths]
    for each in routes:
        each[-1] = 0
    return routes


def test_routes_are_those_of_expert_layers_and_fed_tokens():
    batch = VerlBatch([routed_batch(routes_of())], FORM)
    assert [sample.routes.tolist() for sample in batch.samples] == [[[[1, 2]]] * fed for fed in (3, 1, 2)]
    assert batch.samples[0].routes.dtype == "uint8"


def test_without_verls_flag_routes_are_left_alone():
    data = routed_batch(routes_of())
    tu.assign_non_tensor(data, enable_routing_replay=False)
    assert all(sample.routes is None for sample in VerlBatch([data], FORM).samples)


def test_a_token_without_routes_is_refused_unless_its_sequence_fills_up_the_batch():
    routes = routes_of()
    routes[2][0] = 0
    with pytest.raises(TrainingError, match=r"of 3 tokens: a token is routed to one expert twice; .*mode=R3"):
        VerlBatch([routed_batch(routes)], FORM)
    filler = VerlBatch([routed_batch(routes, counted=(1, 1, 0))], FORM).samples[2]
    assert filler.routes.tolist() == [[[0, 1]]] * 2


def test_replay_without_routes_or_experts_is_refused():
    data = routed_batch(routes_of())
    with pytest.raises(TrainingError, match=r"mode=R3 .* no experts"):
        VerlBatch([data])
    with pytest.raises(TrainingError, match=r"mode=R3 .*rollout\.enable_rollout_routing_replay=true"):
        VerlBatch([data.exclude("routed_experts")], FORM)
