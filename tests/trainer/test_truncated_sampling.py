"""Tokens of truncated sampling in every kind of layout, against Hugging Face with the same support of each token.

Float32. Log-probs and losses agree to 1e-5, gradients to 1e-5 plus 1e-4 of their size.
"""

import numpy as np
import pytest
import torch
from family_layouts import layout_of, reference

from megasync.layout.shards import assemble

FAMILY = "qwen2"
LAYOUTS = {
    1: {"one": {}, "small-microbatches": {"tokens_per_microbatch": 64}},
    2: {
        "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
        "pp2": {"pipeline_parallel": 2, "first_stage_layers": 1, "tokens_per_microbatch": 64},
        "cp2": {"context_parallel": 2, "tokens_per_microbatch": 32, "distributed_optimizer": False},
        "dp2": {"data_parallel": 2, "tokens_per_microbatch": 64, "distributed_optimizer": False},
    },
}
NAMES = [label for layouts in LAYOUTS.values() for label in layouts]


def truncated(rows, vocab):
    """The rows with a random support of each response token; every third row could be anything."""
    generator = np.random.default_rng(5)
    return [
        row
        if number % 3 == 2
        else {**row, "support": [[token, *others(generator, token, vocab)] for token in row["response"]]}
        for number, row in enumerate(rows)
    ]


def others(generator, token, vocab):
    ids = generator.choice(vocab, generator.integers(0, 9), replace=False)
    return ids[ids != token].tolist()


@pytest.fixture(scope="module")
def cases(models, rows):
    return models[FAMILY], truncated(rows, 100)


@pytest.fixture(scope="module")
def results(run_ranks, cases, tmp_path_factory):
    path, given = cases
    folder, found = tmp_path_factory.mktemp("checkpoints"), {}
    for world, layouts in LAYOUTS.items():
        ranks = run_ranks("layouts", world, models={FAMILY: path}, rows=given, layouts=layouts, folder=str(folder))
        found |= {label: [rank[FAMILY, label] for rank in ranks] for label in layouts}
    return found


@pytest.fixture(scope="module")
def expected(cases):
    return reference(*cases)


@pytest.mark.parametrize("layout", NAMES)
def test_scores_losses_and_gradients_are_hugging_faces_over_the_same_tokens(results, expected, cases, layout):
    logprobs, loss, gradients = expected
    for rank in results[layout]:
        torch.testing.assert_close(rank["scores"], logprobs, atol=1e-5, rtol=0)
        assert rank["loss"] == pytest.approx(loss, abs=1e-5)
    options = next(layouts[layout] for layouts in LAYOUTS.values() if layout in layouts)
    map_ = layout_of(cases[0], options)
    for name, gradient in gradients.items():
        found = assemble(name, map_, lambda rank, param: results[layout][rank]["gradients"][param])
        torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_the_support_matters(expected, cases, rows):
    whole, *_ = reference(cases[0], rows)
    assert (whole - expected[0]).min() < -0.5
