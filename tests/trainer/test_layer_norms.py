"""Norms by groups of layers add up to the norms of the whole model, in every layout."""

import math
import re

import pytest
from safetensors.torch import load_file
from trainer_ranks import TWO_RANKS

from megasync.layout.topology import Topology
from megasync.trainer.optimizer import group_names, groups_of

LAYOUTS = TWO_RANKS | {"plain dp2": {**TWO_RANKS["dp2"], "distributed_optimizer": False}}


@pytest.fixture(scope="module")
def norms(run_ranks, models):
    """Metrics of two steps by setting; norms are measured in the second."""
    alone = {"alone": {"model": models["qwen3"]}, "tied": {"model": models["qwen2"]}}
    spread = {name: {"model": models["qwen3"], "trainer": trainer} for name, trainer in LAYOUTS.items()}
    spread["tied pp2"] = {"model": models["qwen2"], "trainer": LAYOUTS["pp2"]}
    results = run_ranks("layer_norms", 1, runs=alone)[0]
    return results | run_ranks("layer_norms", 2, runs=spread)[0]


def of(metrics, kind):
    prefix = f"norms/{kind}/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


@pytest.mark.parametrize("setting", ["alone", "tied", "tied pp2", *LAYOUTS])
def test_squares_of_gradients_add_up_to_that_of_their_norm(norms, setting):
    first, second = norms[setting]
    assert not of(first, "grad")
    parts = of(second, "grad")
    assert math.hypot(*parts.values()) == pytest.approx(second["train/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("setting", LAYOUTS)
def test_norms_are_the_same_in_every_layout(norms, setting):
    for kind in ("grad", "weight"):
        assert of(norms[setting][1], kind) == pytest.approx(of(norms["alone"][1], kind), rel=1e-3)


def test_norms_of_weights_are_those_of_the_model(norms, models):
    """After one update with a learning rate of 0.001 they are still close to those of the folder."""
    tensors = load_file(f"{models['qwen3']}/model.safetensors")
    squares = dict.fromkeys(("embedding", "layers_0", "layers_1", "layers_2", "output"), 0.0)
    for name, tensor in tensors.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        group = f"layers_{layer[1]}" if layer else "embedding" if "embed" in name else "output"
        squares[group] += float(tensor.float().square().sum())
    actual = of(norms["alone"][1], "weight")
    assert actual == pytest.approx({name: math.sqrt(square) for name, square in squares.items()}, rel=1e-2)


def test_a_tied_model_has_one_embedding(norms):
    assert of(norms["tied pp2"][1], "weight") == pytest.approx(of(norms["tied"][1], "weight"), rel=1e-3)


def test_spans_have_all_layers_in_order():
    assert group_names(2) == ["embedding", "layers_0", "layers_1", "output"]
    names = group_names(30)
    assert names[:3] == ["embedding", "layers_0-2", "layers_3-6"] and names[-2:] == ["layers_26-29", "output"]
    one = groups_of([f"decoder.layers.{layer}.x" for layer in range(30)], 30, Topology(), 0)
    assert [names[group] for group in one.values()].count("layers_3-6") == 4
    assert sorted(one.values()) == list(one.values())


def test_layers_of_a_later_stage_have_their_own_numbers():
    topology = Topology(pipeline=2, virtual=2)
    actual = groups_of(["0.decoder.layers.0.x", "1.decoder.layers.1.x", "1.output_layer.weight"], 8, topology, stage=1)
    assert [group_names(8)[group] for group in actual.values()] == ["layers_2", "layers_7", "output"]
