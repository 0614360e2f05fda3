"""Decoder layers as CUDA graphs, with real Megatron and Transformer Engine, and torch's capture over a stand-in.

The stand-in repeats the same calls on the CPU, so results are bitwise those without graphs.
"""

import collections
import contextlib
from unittest import mock

import pytest
import torch
from family_layouts import PADDED, WHOLE
from trainer_ranks import TIMED

from megasync.lab.rehearsal.graphs import StandInGraph

SPLIT = {"tensor_parallel": 2, "sequence_parallel": True}
FUSED = {"gradient_accumulation_fusion": True}
REDUCED = {"data_parallel": 2, "distributed_optimizer": True, "overlap_grad_reduce": True}
ALL_CASES = [
    ("te 0.19.2", "qwen3", 2, SPLIT),
    ("te 0.19.2", "qwen3", 1, FUSED),
    ("te", "qwen3", 2, {**SPLIT, **FUSED}),
    ("te", "qwen3", 2, {"tensor_parallel": 2}),
    *((flavour, "qwen3", 2, REDUCED) for flavour in ("te", "te 0.19.2")),
    ("te", "qwen3", 2, {**REDUCED, **FUSED}),
    ("te", "qwen3", 4, {**SPLIT, **REDUCED}),
    *((flavour, "gemma3_text", 1, {}) for flavour in ("te", "te 0.19.2")),
    ("te", "gemma3_text", 2, SPLIT),
    ("te", "mistral", 1, {}),
]


REFERENCE = {"algorithm": {"kl_coef": 0.1}}
MINIBATCHES = {"trainer": {"minibatches": 2}}
GATHERED = {**REDUCED, "overlap_param_gather": True, "minibatches": 2, "megatron": {"ddp": {"bucket_size": 1000}}}


def ways_of(options):
    plain = {**PADDED, **WHOLE, **options}
    return {"plain": plain, "graphs": {**plain, "cuda_graphs": True}}


@pytest.mark.parametrize(
    ("flavour", "family", "world", "options"),
    [("te", "qwen3", 1, FUSED), *(pytest.param(*case, marks=pytest.mark.matrix) for case in ALL_CASES)],
)
def test_graphs_change_nothing(run_ranks, models, rows, tmp_path, flavour, family, world, options):
    arguments = {"model": models[family], "rows": rows, "folder": str(tmp_path), "dtype": "bfloat16"}
    run = {"function": "one_layout", "ways": ways_of(options), **arguments}
    for rank in run_ranks(in_graphs, world, flavour=flavour, **run):
        plain, graphs = rank["plain"], rank["graphs"]
        # Backward passes once for each microbatch; forward passes also in two scorings.
        count, layers = plain["microbatches"], len(graphs["launches"]) // 2
        assert graphs["launches"] == [count] * layers + [3 * count] * layers
        assert not plain["launches"] and layers > 1
        for name in ("scores", "after"):
            assert torch.equal(graphs[name], plain[name])
        assert (graphs["loss"], graphs["grad_norm"]) == (plain["loss"], plain["grad_norm"])
        # None where each rank has a part of them.
        for name, gradient in (plain["gradients"] or {}).items():
            assert torch.equal(graphs["gradients"][name], gradient), name


@pytest.mark.parametrize(
    ("flavour", "world", "run", "passes"),
    [
        # Scores with a reference's weights have no graph.
        ("te", 1, REFERENCE, 1),
        pytest.param("te", 1, MINIBATCHES, 2, marks=pytest.mark.matrix),
        pytest.param("te", 2, {"trainer": GATHERED}, 2, marks=pytest.mark.matrix),
        pytest.param("te 0.19.2", 2, {"trainer": GATHERED}, 2, marks=pytest.mark.matrix),
    ],
)
def test_steps_of_a_policy(run_ranks, models, flavour, world, run, passes):
    run = {"steps": 3, "model": models["qwen3"], "dtype": "bfloat16", **run}
    ways = ways_of(run.pop("trainer", {}))
    for rank in run_ranks(in_graphs, world, flavour=flavour, function="train", ways=ways, **run):
        backward, forward = rank["graphs"]["launches"][0], rank["graphs"]["launches"][-1]
        assert backward >= 3 and forward == passes * backward
        assert_same_steps(rank, ["weights"])


@pytest.mark.matrix
def test_a_critic(run_ranks, models):
    run = {"function": "train_with_critic", "steps": 2, "model": models["qwen3"], "dtype": "bfloat16"}
    (rank,) = run_ranks(in_graphs, 1, flavour="te", ways=ways_of({}), **run)
    assert rank["graphs"]["launches"]
    assert_same_steps(rank, ["weights", "critic"])


def assert_same_steps(rank, models):
    plain, graphs = rank["plain"], rank["graphs"]
    for metrics in (*plain["metrics"], *graphs["metrics"]):
        for name in TIMED:
            del metrics[name]
    assert graphs["metrics"] == plain["metrics"]
    for name in models:
        assert all(torch.equal(graphs[name][key], weight) for key, weight in plain[name].items())


@pytest.mark.parametrize(("unguarded", "metric"), [("weights", "train/kl"), ("sequences", "train/logprob_diff")])
def test_a_graph_does_not_see_what_changes(run_ranks, models, unguarded, metric):
    """Without a guard of `LayerGraphs` results are wrong; so the stand-in shows that the guards are needed."""
    run = {"function": "train", "steps": 2, "model": models["qwen3"], "dtype": "bfloat16", **REFERENCE}
    (rank,) = run_ranks(in_graphs, 1, flavour="te", ways=ways_of({}), unguarded=unguarded, **run)
    found, right = (rank[way]["metrics"][1][metric] for way in ("graphs", "plain"))
    assert abs(found - right) > 0.02 * abs(right)


def without_guard(name):
    """`LayerGraphs` without one of its guards, or with all of them for None."""
    from megasync.trainer import layer_graphs

    if name is None:
        return contextlib.nullcontext()
    return {
        "weights": mock.patch.object(layer_graphs, "_addresses", lambda params: []),
        "sequences": mock.patch.object(layer_graphs.LayerGraphs, "_set_starts", lambda graphs, packed: None),
    }[name]


def in_graphs(function, ways, unguarded=None, **arguments):
    """What a function returns for each of the trainer's options, and how often each graph was launched."""
    from rank_engines import train, train_with_critic

    functions = {"train": train, "train_with_critic": train_with_critic, "one_layout": one_layout}
    found = {}
    for label, trainer in ways.items():
        launches = collections.Counter()

        def counted(graph, launches=launches, replay=StandInGraph.replay):
            launches[id(graph)] += 1
            replay(graph)

        with mock.patch.object(StandInGraph, "replay", counted), without_guard(unguarded):
            result = functions[function](trainer=trainer, **arguments)
        found[label] = {**result, "launches": sorted(launches.values())}
    return found


def one_layout(model, rows, trainer, folder, dtype):
    from rank_engines import layouts

    label = f"graphs-{'cuda_graphs' in trainer}"
    return layouts({"m": model}, rows, {label: trainer}, folder, dtype)["m", label]
