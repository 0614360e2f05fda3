"""Models on real Megatron ranks through Ray, which lose everything when one of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.trainer_group import TrainerGroup
from megasync.config import Config
from megasync.config.pools import pool_specs
from megasync.errors import DataError, RankLost, TrainingError
from megasync.models import fetch
from megasync.observe.context import RunContext
from megasync.observe.hang import HangReporter
from megasync.observe.state_file import RunState
from megasync.service.interfaces import Adam, AdapterSpec, Datum, Pass, PassResult, ServedModel, Trainer
from megasync.service.ranks import Ranks, trained_config
from megasync.trainer.rank import TrainerRank

pytestmark = pytest.mark.processes

SPECS = {"a": AdapterSpec(4, 1), "b": AdapterSpec(2, 2, mlp=False)}
DATUM = Datum(np.array([3, 4, 5]), {"target_tokens": np.array([4, 5, 6])})
WORK = Pass("cross_entropy", {}, [DATUM, DATUM, DATUM], True)


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[tuple[TrainerGroup, Trainer]]:
    config = Config()
    config.model.path, config.model.dtype = str(fetch("digits", tmp_path / "digits")), "float32"
    config.cluster.device = "cpu"
    config.trainer.tensor_parallel = 2
    config.trainer.lora.rank = 4
    config.rollout.servers = 1
    config = trained_config(config)
    specs = {"trainer": pool_specs(config)["trainer"]}
    cluster = RayCluster(config, devices_needed=specs["trainer"].total_devices)
    await asyncio.to_thread(cluster.connect)
    pools = Pools(specs, "cpu")
    await pools.create(timeout=300)
    state = RunState(time=time.time())
    reports = HangReporter(tmp_path, lambda: state, lambda text: None)
    group = TrainerGroup(config, tmp_path / "run", pools, RunContext(reports=reports))
    try:
        await group.start(None)
        yield group, Ranks(group, config, ServedModel("digits", context=256, vocab=16, rank=4))
    finally:
        await group.stop()
        pools.remove()
        cluster.close()


async def computed(ranks: Trainer, model: str) -> float:
    (result,) = await ranks.compute([(model, WORK)])
    assert isinstance(result, PassResult)
    return result.metrics["loss:sum"]


async def test_models_survive_their_ranks_in_folders(group: tuple[TrainerGroup, Trainer], tmp_path: Path) -> None:
    trainer, ranks = group
    for model, spec in SPECS.items():
        await ranks.create(model, spec)
    bad = Pass("cross_entropy", {}, [Datum(np.array([99]), {"target_tokens": np.array([1])})], True)
    results = await ranks.compute([("a", WORK), ("b", bad), ("b", WORK), ("gone", WORK)])
    first, refused, second, gone = results
    assert isinstance(first, PassResult) and isinstance(second, PassResult)
    assert isinstance(refused, DataError) and isinstance(gone, TrainingError) and not isinstance(gone, RankLost)
    # Fresh adapters add nothing, so both models are the base model; equal data have equal outputs.
    assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], rel=1e-6)
    assert all(np.array_equal(output["logprobs"], first.outputs[0]["logprobs"]) for output in first.outputs)
    assert first.metrics["loss:sum"] == pytest.approx(-sum(out["logprobs"].sum() for out in first.outputs), rel=1e-5)
    for model in SPECS:
        for _ in range(2):
            assert (await ranks.update(model, Adam(0.05)))["skipped:sum"] == 0.0
            await computed(ranks, model)
        write = await ranks.copy_state(model, optimizer=True)
        # What was copied is what is written.
        await computed(ranks, model)
        await write(tmp_path / model)
    losses = {model: await computed(ranks, model) for model in SPECS}
    assert losses["a"] < first.metrics["loss:sum"] - 1.0 and losses["a"] != losses["b"]

    pids = await trainer.on_all(30, TrainerRank.pid)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankLost):
        await ranks.compute([("a", WORK)])
    await ranks.restart()
    (lost,) = await ranks.compute([("a", WORK)])
    assert "there is no model 'a'" in str(lost)
    for model, spec in SPECS.items():
        await ranks.load(model, spec, tmp_path / model, optimizer=True)
    assert {model: await computed(ranks, model) for model in SPECS} == losses
    await ranks.unload("a")
    await ranks.unload("never there")
