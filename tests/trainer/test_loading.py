"""Of the data-parallel ranks that hold a shard, one reads it and sends it to the others."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megasync.config.schema import ModelConfig, TrainerConfig
from megasync.errors import CheckpointError
from megasync.layout import shards
from megasync.layout.shards import load_shards

TRAINERS = {
    "data": {"data_parallel": 2},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "experts": {"data_parallel": 2, "expert_parallel": 2},
    "replicated experts": {"data_parallel": 2, "distributed_optimizer": False},
}


@pytest.fixture(scope="module")
def reads(run_ranks, models, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("reads"))
    return run_ranks(
        read_files,
        2,
        model=models["qwen2_moe"],
        folder=folder,
        trainers={
            name: {**trainer, "sequence_parallel": trainer.get("tensor_parallel", 1) > 1}
            for name, trainer in TRAINERS.items()
        },
    )


@pytest.mark.parametrize("name", TRAINERS)
def test_every_shard_is_read_once_and_arrives_on_every_rank(reads, name):
    first, second = (rank[name] for rank in reads)
    assert first["equal"] and second["equal"]
    for of_first, of_second in zip(first["reads"], second["reads"], strict=True):
        assert of_first == first["all"]
        if name in ("tensor", "pipeline"):
            assert of_second == second["all"]
        else:
            assert of_second == [param for param in second["all"] if name == "experts" and ".local_experts." in param]
            assert bool(of_second) == (name == "experts")


def test_a_folder_that_the_reading_rank_cannot_read_is_named_on_every_rank(run_ranks, models, tmp_path):
    broken = shutil.copytree(models["qwen2"], tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    for error in run_ranks(absent_weights, 2, model=models["qwen2"], broken=str(broken)):
        assert "rank 0: CheckpointError" in error and "has neither model.safetensors nor" in error


def read_files(model, trainers, folder):
    """By trainer: what this rank read of the model folder and of a checkpoint, and whether the weights are right."""
    from rank_engines import checkpoint, close, make_engine

    results, reads = {}, []
    fill = shards.fill_params

    def noted(layout, rank, read, dtype, names=None):
        reads.append(names)
        return fill(layout, rank, read, dtype, names)

    shards.fill_params = checkpoint.fill_params = noted
    for name, trainer in trainers.items():
        engine = make_engine(model, trainer)
        engine.save(Path(folder) / name)
        exact = load_shards(model, engine.layout, dist.get_rank())
        for weight in engine.params().values():
            weight.zero_()
        engine.load(Path(folder) / name)
        equal = all(torch.equal(engine.params()[param], value) for param, value in exact.items())
        folder_reads, _, checkpoint_reads = reads[-3:]
        results[name] = {
            "reads": [sorted(folder_reads), sorted(checkpoint_reads)],
            "all": sorted(exact),
            "equal": equal,
        }
        close(engine)
    shards.fill_params = checkpoint.fill_params = fill
    return results


def absent_weights(model, broken):
    """The error of each data-parallel rank when the first one, which reads for all, has the ``broken`` folder."""
    from rank_engines import DEVICE, MegatronLearner, close

    config = TrainerConfig(data_parallel=2)
    path = model if dist.get_rank() else broken
    engine = MegatronLearner(ModelConfig(path=path, dtype="float32"), config, DEVICE, dist.get_rank(), 10)
    try:
        engine.initialize()
    except CheckpointError as error:
        return str(error)
    finally:
        close(engine)
