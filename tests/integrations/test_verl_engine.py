"""The engine under verl's own TrainingWorker, in spawned ranks, against verl's FSDP2 engine on the same weights and data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tiny_model

pytest.importorskip("verl", reason="verl is not installed; run `pip install --no-deps -r launch/verl.lock`")

RANK = Path(__file__).with_name("verl_rank.py")
DRIVER = Path(__file__).with_name("verl_driver.py")
WORLD = 2
# Seconds for all runs together; several times what they need on two busy cores.
TIMEOUT = 400
RUNS = {
    "fsdp2": {"strategy": "fsdp2", "padding": False},
    "tensor": {"settings": {"tensor_model_parallel_size": 2}},
    "pipeline": {"settings": {"pipeline_model_parallel_size": 2, "use_dynamic_bsz": False}},
    "data": {"settings": {}, "padding": False},
    "experts": {"settings": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}},
    "fsdp2 experts": {"strategy": "fsdp2", "padding": False},
}
# Which of verl's runs computes the same as ours.
THEIRS = {"tensor": "fsdp2", "pipeline": "fsdp2", "data": "fsdp2", "experts": "fsdp2 experts"}
LAYOUTS = list(THEIRS)
# verl's engine exports experts under other names, those of the fused tensors of transformers.
DENSE = [name for name in LAYOUTS if name != "experts"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """The folder that each run trains."""
    root = tmp_path_factory.mktemp("models")
    dense, sparse = (str(make_tiny_model(root / family, family, tokenizer=False)) for family in ("qwen3", "qwen3_moe"))
    return {name: sparse if "experts" in name else dense for name in RUNS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def found(models, saved, tmp_path_factory) -> dict[str, list[dict]]:
    """For each run, what it found on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    requests = {name: {"model": models[name], "strategy": "megasync", **request} for name, request in RUNS.items()}
    for name in LAYOUTS:
        requests[name]["save"] = str(saved / name)
    (folder / "request.json").write_text(json.dumps(requests))
    ranks, logs = [], [folder / f"log-{rank}.txt" for rank in range(WORLD)]
    try:
        for rank, log in enumerate(logs):
            place = {"RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            with log.open("w") as output:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(RANK), str(rank), str(WORLD), str(folder)],
                        env={**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in place.items()}},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        for process, log in zip(ranks, logs, strict=True):
            assert process.wait(TIMEOUT) == 0, log.read_text()[-6000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    results = [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(WORLD)]
    return {name: [result[name] for result in results] for name in RUNS}


@pytest.fixture(scope="module")
def through_ray(models, tmp_path_factory) -> list[dict]:
    """What verl's driver got from a worker group of tensor and data parallel ranks."""
    folder = tmp_path_factory.mktemp("driver")
    log, result = folder / "log.txt", folder / "result.pt"
    with log.open("w") as output:
        command = [sys.executable, str(DRIVER), models["tensor"], str(result)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        assert process.wait(TIMEOUT) == 0, log.read_text()[-6000:]
    finally:
        process.kill()
        process.wait()
    return [torch.load(result, weights_only=False)]


def inferred(ranks, name, pass_):
    """Whole batch, in the order of the data-parallel ranks that verl collects from."""
    parts = {rank["dp"]: rank[pass_][name] for rank in ranks if rank[pass_] is not None}
    return torch.cat([parts[dp] for dp in sorted(parts)])


def metrics(ranks, step):
    return next(rank[step] for rank in ranks if rank[step] is not None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["log_probs", "entropy"])
@pytest.mark.parametrize("pass_", ["infer", "each_its_own"], ids=["one temperature", "each its own"])
def test_scores_are_those_of_verls_engine(found, layout, name, pass_):
    theirs = inferred(found[THEIRS[layout]], name, pass_)
    assert theirs.abs().max() > 1
    torch.testing.assert_close(inferred(found[layout], name, pass_), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_that_only_scores_keeps_the_first_weights_beside_one_that_trains(found, layout):
    for name in ("log_probs", "entropy"):
        assert torch.equal(inferred(found[layout], name, "reference"), inferred(found[layout], name, "infer"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", ["train", "next"])
def test_loss_and_gradient_norm_are_those_of_verls_engine(found, layout, step):
    ours, theirs = metrics(found[layout], step), metrics(found[THEIRS[layout]], step)
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name


@pytest.mark.parametrize("layout", DENSE)
def test_weights_after_a_step_are_those_of_verls_engine(found, layout):
    theirs = found[THEIRS[layout]][0]
    for rank in found[layout]:
        assert rank["after"].keys() == theirs["after"].keys()
        for name, tensor in rank["after"].items():
            torch.testing.assert_close(tensor, theirs["after"][name], atol=1e-4, rtol=0, msg=name)
        assert any(not torch.equal(rank["after"][name], rank["before"][name]) for name in rank["after"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_exports_the_folder_bit_for_bit(found, layout, models):
    folder = load_file(Path(models[layout]) / "model.safetensors")
    for rank in found[layout]:
        assert rank["before"].keys() == folder.keys()
        assert all(torch.equal(rank["before"][name], tensor) for name, tensor in folder.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_engine_goes_on_from_a_checkpoint(found, layout):
    for rank in found[layout]:
        assert all(torch.equal(rank["restored"][name], tensor) for name, tensor in rank["after"].items())
        assert all(torch.equal(rank["end"][name], tensor) for name, tensor in rank["last"].items())
    again, straight = metrics(found[layout], "again"), metrics(found[layout], "next")
    assert again["loss"] == straight["loss"]
    assert again["grad_norm"] == straight["grad_norm"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_exported_folder_holds_the_trained_weights(found, layout, saved):
    folder = load_file(saved / layout / "huggingface" / "model.safetensors")
    trained = found[layout][0]["after"]
    assert folder.keys() == trained.keys()
    assert all(torch.equal(folder[name], tensor) for name, tensor in trained.items())


def test_verls_worker_group_of_ray_actors_computes_the_same(found, through_ray):
    for name in ("log_probs", "entropy"):
        theirs = inferred(found["fsdp2"], name, "infer")
        torch.testing.assert_close(inferred(through_ray, name, "infer"), theirs, atol=1e-4, rtol=0)
    for step in ("train", "next"):
        ours, theirs = metrics(through_ray, step), metrics(found["fsdp2"], step)
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), (step, name)
