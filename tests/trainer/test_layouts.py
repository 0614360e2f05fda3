"""Every family in each kind of layout computes what Hugging Face computes: log-probs, loss, every gradient, a step.

The rows are plain, or each token has given experts, or a support of truncated sampling. `assert_computed` and
`assert_same_weights` say how exactly all of it agrees.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from family_layouts import (
    DENSE_LAYOUTS,
    FAMILIES,
    INTERLEAVED,
    PADDED,
    SPARSE_LAYOUTS,
    WHOLE,
    assert_computed,
    assert_same_weights,
    layout_of,
    reference,
)
from random_models import MODELS, MORE_MODELS, write_model
from random_routes import replayed_reference, routed
from trainer_ranks import assert_same_metrics

from megasync.errors import TrainingError
from megasync.layout.shards import assemble, export_checkpoint

TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
CP2 = {"context_parallel": 2, **WHOLE}
SMALL = {"tokens_per_microbatch": 64}
BUCKETS = {"ddp": {"bucket_size": 1000}, "optimizer": {"apply_wd_to_qk_layernorm": True}}
# Families without anything special, in every option.
BASIC = {
    1: {
        "one": {},
        "small-microbatches": SMALL,
        "recompute": {"recompute": "full"},
        "recompute-one-layer": {"recompute": "full", "recompute_layers": 1},
        "recompute-mlp": {"recompute": "selective", "recompute_modules": ["mlp"]},
    },
    2: {
        "tp2": {"tensor_parallel": 2},
        "tp2-sp": {**TP2, "recompute": "full"},
        "pp2": {"pipeline_parallel": 2, "first_stage_layers": 1, **SMALL},
        "tp2-head": {"tensor_parallel": 2, "float32_head": True},
        "tp2-sp-head": {**TP2, "float32_head": True},
        "dp2-overlap": {"data_parallel": 2, "overlap_grad_reduce": True, **SMALL, "megatron": BUCKETS},
        "dp2-replicated-overlap": {"data_parallel": 2, **WHOLE, "overlap_grad_reduce": True, **SMALL},
        "dp2": {"data_parallel": 2},
        "dp2-replicated": {"data_parallel": 2, **WHOLE, **SMALL},
    },
    4: {
        "tp4": {"tensor_parallel": 4},
        "tp2-pp2-sp": {**TP2, "pipeline_parallel": 2, "last_stage_layers": 1, **PADDED},
        "tp2-dp2": {"tensor_parallel": 2, "data_parallel": 2, **SMALL},
    },
}
# Chunks of layers of different sizes, of a model of six layers.
UNEVEN = {"pipeline_parallel": 2, "virtual_pipeline": 2, "pipeline_layout": [1, 2, 1, 2], **SMALL}
PLAIN = {**dict.fromkeys(MODELS, BASIC), **FAMILIES, "deep": {1: {"one": {}}, 2: {"pp2-vpp2-uneven": UNEVEN}}}
# Sequences that several ranks share.
CONTEXT_DENSE = {
    2: {"cp2": CP2, "cp2-distributed": {"context_parallel": 2, "tokens_per_microbatch": 48, "pad_microbatches": True}},
    4: {
        "cp4": {"context_parallel": 4, **WHOLE},
        "cp2-tp2": {**CP2, **TP2},
        "cp2-pp2": {**CP2, "pipeline_parallel": 2, "last_stage_layers": 1},
        "cp2-dp2": {**CP2, "data_parallel": 2, "tokens_per_microbatch": 32},
    },
}
# Experts are shared by context ranks, by tensor and context ranks, or by context and data ranks.
CONTEXT_SPARSE = {
    2: {"cp2-ep2": {**CP2, "expert_parallel": 2}, "cp2-distributed": CONTEXT_DENSE[2]["cp2-distributed"]},
    4: {
        **CONTEXT_DENSE[4],
        "cp2-tp2": {**CP2, **TP2, "expert_parallel": 2, "expert_tensor_parallel": 1, "recompute": "full"},
        "cp2-pp2": {**CP2, **INTERLEAVED},
        "cp2-dp2": {**CONTEXT_DENSE[4]["cp2-dp2"], "expert_parallel": 4},
    },
}
CONTEXT = {
    family: CONTEXT_DENSE if layouts in (BASIC, DENSE_LAYOUTS) else CONTEXT_SPARSE
    for family, layouts in PLAIN.items()
    if 2 in layouts and family not in ("deep", "gemma3", "glm4_moe", "qwen3_5_moe")
}
ROUTED = {
    1: {
        "one": {},
        "recompute": {"recompute": "full", **SMALL},
        "recompute-one-layer": {"recompute": "full", "recompute_layers": 1, **SMALL},
        "recompute-moe": {"recompute": "selective", "recompute_modules": ["moe"], **SMALL},
    },
    2: {
        "tp2-ep2-etp1": {**TP2, "expert_parallel": 2, "expert_tensor_parallel": 1, "recompute": "full"},
        "pp2-recompute": {"pipeline_parallel": 2, "recompute": "full", **SMALL},
        "pp2-vpp2": {**INTERLEAVED, "recompute": "full"},
        "ep2": {"data_parallel": 2, "expert_parallel": 2, **SMALL, **WHOLE},
        "cp2": {**CP2, "tokens_per_microbatch": 32},
    },
}
TRUNCATED = {
    1: {"one": {}, "small-microbatches": SMALL},
    2: {
        "tp2-sp": TP2,
        "pp2": BASIC[2]["pp2"],
        "cp2": {**CP2, "tokens_per_microbatch": 32},
        "dp2": {"data_parallel": 2, **SMALL, **WHOLE},
    },
}


def truncated(rows, path):
    """The rows with a random support of each response token; every third row could be anything."""
    generator = np.random.default_rng(5)

    def support(token):
        ids = generator.choice(100, generator.integers(0, 9), replace=False)
        return [token, *ids[ids != token].tolist()]

    return [
        row if number % 3 == 2 else {**row, "support": [support(token) for token in row["response"]]}
        for number, row in enumerate(rows)
    ]


class Kind(NamedTuple):
    """Rows of one kind, in layouts by family and number of ranks, and what Hugging Face computes of them."""

    families: Mapping[str, Mapping[int, Mapping[str, dict[str, Any]]]]
    rows: Callable[..., list[dict]] = lambda rows, path: rows
    expected: Callable[..., Any] = reference


KINDS = {
    "plain": Kind(PLAIN),
    "context": Kind(CONTEXT),
    # The experts are random, so that a router that chooses itself is far off.
    "routes": Kind(
        dict.fromkeys(("qwen3_moe", "deepseek_v3", "glm4_moe", "llama4_text"), ROUTED), routed, replayed_reference
    ),
    "support": Kind({"qwen2": TRUNCATED}, truncated),
}
CASES = {
    (name, family, label): options
    for name, kind in KINDS.items()
    for family, worlds in kind.families.items()
    for layouts in worlds.values()
    for label, options in layouts.items()
}


# The standard tier runs one family, and two ranks at most.
STANDARD = ("qwen3",)


def is_standard(kind, family, layout):
    return kind == "plain" and family in STANDARD and layout not in PLAIN[family].get(4, ())


def cases(*names, without=()):
    """Parameters of a test."""
    return [
        pytest.param(*case, marks=pytest.mark.standard if is_standard(*case) else ())
        for case in CASES
        if case[0] in names and case[2] not in without
    ]


@pytest.fixture(scope="module")
def paths(models, tmp_path_factory):
    deep = write_model(tmp_path_factory.mktemp("model") / "deep", {**MORE_MODELS["mistral"], "num_hidden_layers": 6})
    return {**models, "deep": str(deep)}


@pytest.fixture(scope="module")
def results(run_ranks, paths, rows, tmp_path_factory):
    """results(kind, family): ranks(layout), which gives the results of all ranks; Hugging Face's; and the folder of
    checkpoints. All layouts of a number of ranks are computed when the first of them is asked for.
    """

    @cache
    def of(name, family):
        kind, folder, path = KINDS[name], tmp_path_factory.mktemp("checkpoints"), paths[family]
        prepared, worlds = kind.rows(rows, path), kind.families[family]

        @cache
        def over(world):
            arguments = {"models": {family: path}, "rows": prepared, "layouts": worlds[world], "folder": str(folder)}
            return run_ranks("layouts", world, **arguments)

        def ranks(label):
            (world,) = (world for world, layouts in worlds.items() if label in layouts)
            return [rank[family, label] for rank in over(world)]

        return ranks, kind.expected(path, prepared), folder

    return of


@pytest.mark.parametrize(("kind", "family", "layout"), cases(*KINDS))
def test_a_layout_computes_what_hugging_face_does(results, paths, kind, family, layout):
    options, (ranks, expected, _) = CASES[kind, family, layout], results(kind, family)
    assert_computed(ranks(layout), expected, layout_of(paths[family], options), options)
    if "virtual_pipeline" in options:
        assert all(rank["microbatches"] % options["pipeline_parallel"] == 0 for rank in ranks(layout))


@pytest.mark.parametrize(("kind", "family", "layout"), cases("plain", without=("one",)))
def test_weights_after_a_step_are_those_of_one_rank(results, paths, kind, family, layout, tmp_path):
    ranks, (*_, gradients), folder = results(kind, family)
    alone, first = ranks("one")[0], ranks(layout)[0]
    for label in ("one", layout):
        export_checkpoint(folder / f"{family}-{label}", paths[family], tmp_path / label)
    either = assert_same_weights(tmp_path / "one", tmp_path / layout, gradients)
    # A weight that went the other way may change the log-prob of a token by as much as it differs itself.
    tolerance = 2.1e-3 if either else 1e-4
    torch.testing.assert_close(first["after"], alone["after"], atol=tolerance, rtol=0)
    assert (alone["after"] - alone["scores"]).abs().max() > 1e-3


@pytest.mark.parametrize("family", MODELS)
def test_options_make_the_microbatches_and_reach_megatrons_classes(results, family):
    ranks, *_ = results("plain", family)
    for label in (label for name, of, label in CASES if (name, of) == ("plain", family)):
        options = CASES["plain", family, label]
        for rank in ranks(label):
            assert (rank["buckets"] > 5) == rank["decays_qk_norms"] == ("megatron" in options), label
            assert (rank["microbatches"] > 1) == ("tokens_per_microbatch" in options), label
        lengths = {length for rank in ranks(label) for length in rank["lengths"]}
        assert (lengths == {96}) == ("pad_microbatches" in options), label


@pytest.mark.parametrize(("kind", "family"), [("routes", "qwen3_moe"), ("routes", "deepseek_v3"), ("support", "qwen2")])
def test_given_experts_and_supports_matter(paths, rows, kind, family):
    """They give other log-probs, and those of truncated targets are higher."""
    path, changed = paths[family], KINDS[kind]
    plain, others = reference(path, rows)[0], changed.expected(path, changed.rows(rows, path))[0]
    assert (plain - others).abs().max() > 1e-3 and (kind == "routes" or (plain - others).min() < -0.5)


# One response, so that every layout has one microbatch that counts; others are masked copies, and most are padded.
BALANCED = {
    1: {"one": {}},
    2: {
        "ep2": {"data_parallel": 2, "expert_parallel": 2, **WHOLE},
        "tp2-ep2-etp1-recompute": SPARSE_LAYOUTS[2]["tp2-ep2-etp1"],
        "pp2-vpp2": {**INTERLEAVED, **PADDED},
        "cp2-ep2": CONTEXT_SPARSE[2]["cp2-ep2"],
    },
    4: {"tp2-pp2": {**TP2, "pipeline_parallel": 2}, **CONTEXT_SPARSE[4]},
}


def test_losses_of_routers_are_those_of_papers_and_ignore_padding_and_masked_copies(run_ranks, models, rows, tmp_path):
    row, path = rows[3], models["qwen2_moe"]
    assert (len(row["prompt"]) + len(row["response"]) - 1) % 2
    plain, balanced, expected = (
        reference(path, [row], balance, squares)[2] for balance, squares in ((0, 0), (0.5, 0), (0.5, 0.1))
    )
    router = "model.layers.1.mlp.gate.weight"
    assert (balanced[router] - plain[router]).abs().max() > 1e-3 < (expected[router] - balanced[router]).abs().max()
    given = {"moe_aux_loss": 0.5, "megatron": {"model": {"moe_z_loss_coeff": 0.1}}}
    for world, layouts in BALANCED.items():
        options = {label: {**layout, **given} for label, layout in layouts.items()}
        ranks = run_ranks("layouts", world, models={"m": path}, rows=[row], layouts=options, folder=str(tmp_path))
        for label in layouts:
            layout, gradients = layout_of(path, options[label]), [rank["m", label]["gradients"] for rank in ranks]
            for name in layout.hf_tensors:
                actual = assemble(name, layout, lambda rank, param, of=gradients: of[rank][param])
                torch.testing.assert_close(
                    actual, expected[name], atol=1e-5, rtol=1e-4, msg=lambda text, at=(label, name): f"{at}: {text}"
                )


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_closed_engine_frees_its_model(run_ranks, models, rows, family):
    (freed,) = run_ranks(is_freed, 1, model=models[family], rows=rows)
    assert freed


def is_freed(model, rows):
    """Whether a closed engine's model is freed after a training step."""
    from rank_engines import close, cross_entropy, make_engine, to_samples

    engine = make_engine(model)
    engine.forward_backward(engine.local_batch(to_samples(rows)), cross_entropy(10))
    chunk = weakref.ref(engine.chunks[0])
    close(engine)
    del engine
    gc.collect()
    return chunk() is None


@pytest.mark.standard
@pytest.mark.parametrize(
    ("ranks", "plain", "changed"),
    [
        (2, {"data_parallel": 2, "tokens_per_microbatch": 128}, {"pad_microbatches": True}),
        (1, {}, {"context_parallel": 2}),
    ],
    ids=["padding", "context"],
)
def test_an_option_changes_no_metric_of_policy_steps(run_ranks, models, ranks, plain, changed):
    """With KL and entropy terms, correction per sequence, two optimizer steps a batch and clipping."""
    algorithm = {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": "sequence"}
    run, trainer = {"model": models["qwen3"], "steps": 2, "algorithm": algorithm}, {**plain, "minibatches": 2}
    expected = run_ranks("train", ranks, trainer=trainer, **run)[0]["metrics"]
    for rank in run_ranks("train", 2, trainer=trainer | changed, **run):
        for ours, theirs in zip(rank["metrics"], expected, strict=True):
            assert_same_metrics(ours, theirs, rel=1e-3, abs=1e-5)


@pytest.mark.standard
def test_a_sequence_longer_than_a_padded_microbatch_is_an_error(run_ranks, models, rows):
    options = {**SMALL, "pad_microbatches": True}
    (text,) = run_ranks(too_long, 1, model=models["qwen3"], rows=rows, trainer=options)
    assert "a sequence has 77 tokens, but trainer.pad_microbatches=true pads microbatches to 64" in text


def too_long(model, rows, trainer):
    """The error of a batch that one of the rows does not fit."""
    from rank_engines import close, make_engine, to_samples

    engine = make_engine(model, trainer)
    try:
        engine.local_batch(to_samples(rows))
    except TrainingError as error:
        return str(error)
    finally:
        close(engine)
