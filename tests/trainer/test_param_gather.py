"""Gathering weights in forward passes (`trainer.overlap_param_gather`) changes nothing that anybody reads."""

import pytest
import torch

DENSE = {
    "data": {"data_parallel": 2, "minibatches": 2},
    # Each pass has several microbatches.
    "small": {"data_parallel": 2, "minibatches": 2, "tokens_per_microbatch": 64},
}
EXPERTS = {"experts": {"data_parallel": 2, "expert_parallel": 2, "minibatches": 2}}
READERS = ("weights", "score", "save", "reference", "metrics")


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(
    ("families", "layouts"),
    [
        (("qwen2",), {"data": DENSE["data"]}),
        pytest.param(("llama", "qwen3", "deepseek_v3"), DENSE, marks=pytest.mark.matrix),
        pytest.param(("qwen3_moe",), EXPERTS, marks=pytest.mark.matrix),
    ],
)
def test_every_reader_finds_the_same_weights(run_ranks, models, tmp_path, families, layouts):
    """Bitwise, on every rank: the weight sync, scores, checkpoints, the reference policy, and the next steps."""
    paths = {family: models[family] for family in families}
    for rank in run_ranks("overlapped", 2, models=paths, trainers=layouts, folder=str(tmp_path)):
        for family, label in ((family, label) for family in families for label in layouts):
            plain, overlapped = (rank[family, label, overlap] for overlap in (False, True))
            assert overlapped["buckets"] > 3
            for reader in READERS:
                assert same(plain[reader], overlapped[reader]), (family, label, reader)


def test_a_forgotten_gather_is_found(run_ranks, models, tmp_path):
    """If nobody waits for weights, all but forward passes find old parts of other ranks."""
    arguments = {"models": {"qwen2": models["qwen2"]}, "trainers": {"data": DENSE["data"]}, "folder": str(tmp_path)}
    for rank in run_ranks("overlapped", 2, forgotten=True, **arguments):
        plain, overlapped = (rank["qwen2", "data", overlap] for overlap in (False, True))
        for reader in ("weights", "save", "reference"):
            assert not same(plain[reader], overlapped[reader]), reader
