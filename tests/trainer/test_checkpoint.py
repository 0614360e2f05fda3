"""A checkpoint is complete or absent, and a resumed run equals the run that never stopped."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megasync.errors import CheckpointError
from megasync.trainer import checkpoint

# World -> name -> (model, dtype, trainer options).
RUNS = {
    1: {"one": ("qwen2", "float32", {})},
    2: {
        "distributed-optimizer": ("qwen2", "float32", {"data_parallel": 2}),
        "distributed-optimizer-bfloat16": ("qwen2", "bfloat16", {"data_parallel": 2}),
        "tensor-parallel-bfloat16": ("qwen2", "bfloat16", {"tensor_parallel": 2}),
        "pipeline": ("qwen2", "float32", {"pipeline_parallel": 2, "last_stage_layers": 1}),
        "experts": ("qwen3_moe", "float32", {"data_parallel": 2, "expert_parallel": 2}),
        "experts-bfloat16": ("qwen2_moe", "bfloat16", {"data_parallel": 2, "expert_parallel": 2}),
        "latent-attention-bfloat16": (
            "deepseek_v3",
            "bfloat16",
            {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 1},
        ),
        "experts-virtual-pipeline": ("qwen3_moe", "float32", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    },
}


@pytest.fixture(scope="module")
def resumed(run_ranks, models, tmp_path_factory):
    found = {}
    for world, runs in RUNS.items():
        runs = {
            name: {"model": models[model], "dtype": dtype, "trainer": trainer}
            for name, (model, dtype, trainer) in runs.items()
        }
        ranks = run_ranks("resume", world, runs=runs, folder=str(tmp_path_factory.mktemp("resume")))
        found |= {name: [rank[name] for rank in ranks] for name in runs}
    return found


@pytest.mark.parametrize("name", [name for runs in RUNS.values() for name in runs])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(resumed, name):
    for rank in resumed[name]:
        metrics, weights = rank["straight"]
        resumed_metrics, resumed_weights = rank["resumed"]
        assert metrics == resumed_metrics
        assert all(torch.equal(weights[key], resumed_weights[key]) for key in weights)
        assert rank["state"] == {"step": 2, "note": "hello"}


@pytest.fixture(scope="module")
def broken(run_ranks, models, tmp_path_factory):
    return run_ranks("broken_checkpoints", 2, model=models["llama"], folder=str(tmp_path_factory.mktemp("broken")))


def test_a_full_disk_on_one_rank_fails_all_and_leaves_the_earlier_checkpoint(broken):
    for rank in broken:
        assert "could not write checkpoint" in rank["full"]
        assert "rank 1: OSError: [Errno 27] File too large" in rank["full"]
        assert rank["left"] == ["step-00000001"]
        assert rank["latest"] == "step-00000001"
        assert rank["again"] is None


def test_a_missing_shard_is_refused_on_every_rank_before_a_weight_changes(broken):
    for rank in broken:
        assert "rank 1: " in rank["missing"]
        assert "model-00001.safetensors" in rank["missing"]
        assert rank["kept"]


def test_a_checkpoint_is_never_overwritten(broken):
    assert all("already exists" in rank["existing"] for rank in broken)


def test_another_layout_is_refused_by_name(broken):
    for rank in broken:
        assert "its topology is Topology(tensor=2" in rank["layout"]
        assert "is not a complete checkpoint" in rank["absent"]


def test_each_rank_syncs_what_it_wrote_and_the_marker_comes_after_all(tmp_path, monkeypatch):
    """On a network file system no host can sync what another one wrote."""
    order, sync, replace = [], os.fsync, os.replace

    def synced(handle):
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.lstrip(".").partition(".")[0])
        sync(handle)

    def replaced(source, target):
        order.append(f"-> {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(checkpoint, "run_collectively", lambda work, *_: work())
    monkeypatch.setattr(checkpoint, "describe", lambda *_: {})
    layout = SimpleNamespace(writers=lambda rank: {"w": rank})
    path = checkpoint.step_path(tmp_path, 3)
    for rank in (1, 0):
        if rank:
            path.with_name(path.name + checkpoint.PARTIAL).mkdir(parents=True)
            monkeypatch.setattr(checkpoint, "_make_room", lambda *_: None)
        checkpoint.save(
            path, checkpoint.Shard(layout, "float32", rank, {"w": torch.ones(2)}, {}), {}, torch.device("cpu")
        )
        if rank:
            assert order == ["model-00001", "optimizer-1"]
            order.clear()
    assert order[:2] == ["model-00000", "optimizer-0"]
    assert [name for name in order if name.startswith("->")] == [
        *("-> layout.json", "-> state.json", "-> COMPLETE", "-> step-00000003")
    ]
    assert order[-4:] == [path.name, "-> step-00000003", "checkpoints", tmp_path.name]
    assert checkpoint.latest(tmp_path) == path


def whole(run, step):
    path = checkpoint.step_path(run, step)
    path.mkdir(parents=True)
    (path / checkpoint.STATE).write_text(json.dumps({"step": step}))
    (path / checkpoint.MARKER).touch()
    return path


def test_latest_sees_only_whole_checkpoints(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    whole(tmp_path, 9)
    newest = whole(tmp_path, 100)
    checkpoint.step_path(tmp_path, 200).mkdir()
    assert checkpoint.latest(tmp_path) == newest
    assert checkpoint.read_state(newest) == {"step": 100}
    with pytest.raises(CheckpointError, match="no COMPLETE file"):
        checkpoint.read_state(checkpoint.step_path(tmp_path, 200))


@pytest.mark.parametrize(("keep", "left"), [(1, [3]), (2, [2, 3]), (5, [1, 2, 3]), (0, [1, 2, 3])])
def test_pruning_keeps_the_newest_and_clears_broken_saves(tmp_path, keep, left):
    for step in (1, 2, 3):
        whole(tmp_path, step)
    partial = checkpoint.step_path(tmp_path, 4)
    partial.with_name(partial.name + checkpoint.PARTIAL).mkdir()
    checkpoint.prune(tmp_path, keep)
    found = sorted((tmp_path / checkpoint.FOLDER).iterdir())
    assert found == [checkpoint.step_path(tmp_path, step) for step in left]
