"""Sequences that several ranks share: who holds which tokens, and that nothing that is computed depends on it."""

import numpy as np
import pytest
import torch
from family_layouts import INTERLEAVED, WHOLE, biases, layout_of, norm, reference
from hypothesis import given
from hypothesis import strategies as st
from random_models import MODELS, MORE_MODELS
from trainer_ranks import TIMED

from megasync.config.schema import ModelConfig, TrainerConfig
from megasync.errors import ConfigError
from megasync.layout.layout import Layout
from megasync.layout.shards import assemble
from megasync.layout.topology import Topology
from megasync.trainer.architecture import check_trainer
from megasync.trainer.batch import Sample, lengths_of, make_batch
from megasync.trainer.context import split_tokens
from megasync.trainer.packing import plan_packing

CPU = torch.device("cpu")
TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
CP2 = {"context_parallel": 2, **WHOLE}
DENSE = {
    2: {"cp2": CP2, "cp2-distributed": {"context_parallel": 2, "tokens_per_microbatch": 48, "pad_microbatches": True}},
    4: {
        "cp4": {"context_parallel": 4, **WHOLE},
        "cp2-tp2": {**CP2, **TP2},
        "cp2-pp2": {**CP2, "pipeline_parallel": 2, "last_stage_layers": 1},
        "cp2-dp2": {**CP2, "data_parallel": 2, "tokens_per_microbatch": 32},
    },
}
# Experts are shared by context ranks, by tensor and context ranks, or by context and data ranks.
SPARSE = {
    2: {"cp2-ep2": {**CP2, "expert_parallel": 2}, "cp2-distributed": DENSE[2]["cp2-distributed"]},
    4: {
        **DENSE[4],
        "cp2-tp2": {**CP2, **TP2, "expert_parallel": 2, "expert_tensor_parallel": 1, "recompute": "full"},
        "cp2-pp2": {**CP2, **INTERLEAVED},
        "cp2-dp2": {**DENSE[4]["cp2-dp2"], "expert_parallel": 4},
    },
}
FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "glm4", "gemma3_text"), DENSE),
    **dict.fromkeys(
        (
            "qwen3_moe",
            "qwen2_moe",
            "deepseek_v3",
            "deepseek_v3_plain",
            "minimax_m2",
            "gpt_oss",
            "qwen3_next",
            "llama4_text",
        ),
        SPARSE,
    ),
}
LEAN = [("qwen3", 2), ("deepseek_v3", 2)]
EVERY = [
    pytest.param(family, world, marks=() if (family, world) in LEAN else pytest.mark.matrix)
    for family, layouts in FAMILIES.items()
    for world in layouts
]


@pytest.mark.parametrize(("family", "world"), EVERY)
def test_scores_losses_and_gradients_are_hugging_faces(run_ranks, models, rows, tmp_path, family, world):
    """As with one rank, in float32: to 1e-5, gradients to 1e-5 plus 1e-4 of their size."""
    layouts = FAMILIES[family][world]
    logprobs, loss, gradients = reference(models[family], rows)
    path = {family: models[family]}
    ranks = run_ranks("layouts", world, models=path, rows=rows, layouts=layouts, folder=str(tmp_path))
    for label, options in layouts.items():
        results = [rank[family, label] for rank in ranks]
        for result in results:
            torch.testing.assert_close(result["scores"], logprobs, atol=1e-5, rtol=0)
            assert result["loss"] == pytest.approx(loss, abs=1e-5)
            assert result["tokens"] == len(logprobs)
            assert result["grad_norm"] == pytest.approx(norm(gradients), rel=1e-4)
            assert torch.equal(result["after"], results[0]["after"])
        if not options.items() >= WHOLE.items():
            continue
        map_ = layout_of(models[family], options)
        for name in map_.hf_tensors.keys() - biases(map_):
            found = assemble(name, map_, lambda rank, param, held=results: held[rank]["gradients"][param])
            torch.testing.assert_close(
                found, gradients[name], atol=1e-5, rtol=1e-4, msg=lambda text, at=(label, name): f"{at}: {text}"
            )


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 4])
def test_the_balancing_loss_is_switch_transformers_whoever_holds_the_tokens(run_ranks, models, rows, tmp_path, world):
    """Padding at the end of the sequence, which one rank has, does not count."""
    path, row = models["qwen2_moe"], rows[3]
    _, _, expected = reference(path, [row], balance=0.5)
    layouts = {label: {**options, "moe_aux_loss": 0.5} for label, options in SPARSE[world].items()}
    layouts.pop("cp2-distributed", None)
    ranks = run_ranks("layouts", world, models={"m": path}, rows=[row], layouts=layouts, folder=str(tmp_path))
    for label, options in layouts.items():
        map_ = layout_of(path, options)
        for name in map_.hf_tensors:
            found = assemble(name, map_, lambda rank, param, at=label: ranks[rank]["m", at]["gradients"][param])
            torch.testing.assert_close(
                found, expected[name], atol=1e-5, rtol=1e-4, msg=lambda text, at=(label, name): f"{at}: {text}"
            )


@pytest.mark.matrix
def test_steps_of_the_policy_are_those_of_one_rank(run_ranks, models):
    """With entropy and KL terms, correction per sequence, two optimizer steps a batch and clipping."""
    algorithm = {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": "sequence"}
    run = {"model": models["qwen3"], "steps": 2, "algorithm": algorithm}
    (one,) = run_ranks("train", 1, trainer={"minibatches": 2}, **run)
    for found in run_ranks("train", 2, trainer={"minibatches": 2, "context_parallel": 2}, **run):
        for ours, theirs in zip(found["metrics"], one["metrics"], strict=True):
            assert ours.keys() == theirs.keys()
            for key in ours.keys() - TIMED:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key


@given(chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4), ranks=st.integers(1, 4))
def test_ranks_share_the_tokens_and_the_work_of_every_sequence(chunks, ranks):
    lengths = [2 * ranks * size for size in chunks]
    parts = split_tokens(lengths, ranks)
    assert sorted(parts.flatten().tolist()) == list(range(sum(lengths)))
    first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    positions = np.arange(sum(lengths)) - first
    # A query attends to as many keys as there are positions up to its own.
    assert len({int((positions[part] + 1).sum()) for part in parts}) == 1
    assert all((np.diff(part) > 0).all() for part in parts)


SAMPLES = [Sample.of([1, 2, 3], [10, 11, 12], [0, 2]), Sample.of([7], [40, 41]), Sample.of([5] * 9, [50], [0])]


@pytest.mark.parametrize("flavour", ["te", "local"])
@pytest.mark.parametrize("multiple", [1, 3])
def test_each_target_is_read_once_from_the_token_before_it(flavour, multiple):
    ranks = 2
    packing = plan_packing(
        lengths_of(SAMPLES), ranks=1, budget=100, attention_cost=0.0, share_prompts=False, chunks=2 * ranks
    )
    (microbatch,) = packing.microbatches(0)
    assert (packing.counted_tokens, microbatch.tokens) == (5 + 2 + 9, 8 + 4 + 12)
    found, kept, fed = {}, [], []
    for rank in range(ranks):
        batch = make_batch(
            microbatch, SAMPLES, index=0, multiple=multiple, device=CPU, flavour=flavour, context=(ranks, rank)
        )
        own = batch.ids[0]
        assert len(own) % multiple == 0 and len(own) * ranks == batch.packed.cu_seqlens_q[-1]
        assert (batch.packed.positions, batch.packed.plan is None) == (None, flavour == "te")
        fed += own[~batch.padding[0]].tolist()
        for place, row in zip(batch.kept.tolist(), batch.packed.rows.tolist(), strict=True):
            found[place] = (int(own[row]), int(batch.targets[place]))
        assert torch.equal(batch.own_targets, batch.targets[batch.kept])
        kept += batch.kept.tolist()
    assert sorted(kept) == list(range(5))
    assert sorted(fed) == sorted(token for each in SAMPLES for token in [*each.prompt, *each.response[: each.fed]])
    expected = {0: [(3, 10), (11, 12)], 1: [(7, 40), (40, 41)], 2: [(5, 50)]}
    assert [found[place] for place in range(5)] == [pair for index in microbatch.sequences for pair in expected[index]]


def test_windows_and_sinks_over_ranks_on_gpus_need_the_exchange_of_heads():
    trainer = TrainerConfig(context_parallel=2)
    layout = Layout(MORE_MODELS["gpt_oss"], Topology.from_config(trainer), "te")
    with pytest.raises(ConfigError, match=r"context_parallel=2 needs trainer\.context_parallel_comm=a2a, but .*=p2p"):
        check_trainer(layout, trainer, ModelConfig(dtype="bfloat16"))


def test_chunks_over_ranks_on_gpus_are_refused():
    trainer = TrainerConfig(context_parallel=2, context_parallel_comm="a2a")
    layout = Layout(MORE_MODELS["llama4_text"], Topology.from_config(trainer), "te")
    with pytest.raises(
        ConfigError, match="context_parallel=2 does not support attention in chunks, which the model has"
    ):
        check_trainer(layout, trainer, ModelConfig(dtype="bfloat16"))


def test_heads_of_gated_delta_nets_that_ranks_cannot_share_are_refused():
    trainer = TrainerConfig(context_parallel=4, tensor_parallel=2)
    layout = Layout(MORE_MODELS["qwen3_next"], Topology.from_config(trainer))
    with pytest.raises(
        ConfigError, match="tensor_parallel=2 .*context_parallel=4 = 8 must be a divisor of model's linear_num_key_h"
    ):
        check_trainer(layout, trainer, ModelConfig(dtype="float32"))


@pytest.mark.parametrize(
    ("options", "dtype", "words"),
    [
        ({}, "float32", r"context_parallel=2 needs model\.dtype=bfloat16, but"),
        ({"context_parallel_comm": "a2a"}, "bfloat16", r"must be a divisor of model's num_key_value_heads=1"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_they_start(options, dtype, words):
    trainer = TrainerConfig(context_parallel=2, **options)
    layout = Layout(MODELS["qwen3"], Topology.from_config(trainer), "te")
    with pytest.raises(ConfigError, match=words):
        check_trainer(layout, trainer, ModelConfig(dtype=dtype))
