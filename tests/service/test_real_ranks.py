"""Models on real Megatron ranks through Ray, which lose everything when one of them is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_fakes import FakeServers

from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.trainer_group import TrainerGroup
from megasync.config import Config
from megasync.config.pools import pool_specs
from megasync.errors import DataError, RankLost, TrainingError
from megasync.observe.context import RunContext
from megasync.observe.hang import HangReporter
from megasync.observe.state_file import RunState
from megasync.service.interfaces import Adam, AdapterSpec, Datum, Pass, PassResult, ServedModel, Trainer
from megasync.service.ranks import Ranks, trained_config
from megasync.service.requests import Compute, CreateModel, OptimStep, Request
from megasync.service.service import Service
from megasync.starters.fetch import fetch
from megasync.tenants.rank import TenantTrainerRank
from megasync.trainer.rank import TrainerRank

pytestmark = pytest.mark.processes

SPECS = {"a": AdapterSpec(4, 1), "b": AdapterSpec(2, 2, mlp=False)}
DATUM = Datum(np.array([3, 4, 5]), {"target_tokens": np.array([4, 5, 6])})
WORK = Pass("cross_entropy", {}, [DATUM, DATUM, DATUM], True)


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[tuple[TrainerGroup, Trainer]]:
    config = Config()
    config.observe.trace = True
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
    group = TrainerGroup(config, tmp_path / "run", pools, RunContext(reports=reports), TenantTrainerRank)
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


@pytest.mark.matrix
async def test_models_survive_their_ranks_in_folders(group: tuple[TrainerGroup, Trainer], tmp_path: Path) -> None:
    trainer, ranks = group
    for model, spec in SPECS.items():
        await ranks.create(model, spec)
    bad = Pass("cross_entropy", {}, [Datum(np.array([1]), {"target_tokens": np.array([99])})], True)
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


class Gathered:
    """The ranks, which compute nothing until a pass of each of so many tenants is accepted."""

    def __init__(self, ranks: Trainer, tenants: int) -> None:
        self._ranks = ranks
        self._tenants = tenants
        self.accepted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    async def compute(self, passes: Sequence[tuple[str, Pass]]) -> Sequence[PassResult | Exception]:
        while self.accepted % self._tenants:
            await asyncio.sleep(0.01)
        return await self._ranks.compute(passes)


def microbatches(folder: Path, name: str = "forward_backward") -> list[int]:
    """The models of each microbatch that rank 0 has traced, in order."""
    text = "".join(file.read_text() for file in sorted(folder.glob("trainer-0-*")))
    events = [json.loads(line.rstrip(",")) for line in text.splitlines() if line.startswith("{")]
    found = [event["args"] for event in events if event["name"] == name]
    return [args.get("models", 1) for args in found for _ in range(args["microbatches"])]


@pytest.mark.matrix
async def test_small_passes_of_eight_tenants_share_microbatches_and_equal_each_alone(
    group: tuple[TrainerGroup, Trainer], tmp_path: Path
) -> None:
    _, ranks = group
    random = np.random.default_rng(0)
    works = []
    for size in range(20, 36, 2):
        tokens = random.integers(0, 10, (2, size))
        data = [Datum(each[:-1], {"target_tokens": each[1:]}) for each in tokens]
        works.append(Pass("cross_entropy", {}, data, True))
    served = ServedModel("digits", context=256, vocab=16, rank=4)

    async def trained(service: Service, gathered: Gathered, number: int, stepped: asyncio.Barrier) -> list[Any]:
        """What a tenant's model computes: a pass, a step, and a pass after it."""
        tenant = f"tenant-{number}"

        async def outcome(request: Request) -> Any:
            promise = await service.submit(tenant, request)
            gathered.accepted += isinstance(request, Compute)
            return await service.outcome(tenant, promise, 120)

        session = await service.create_session(tenant)
        spec = AdapterSpec(1 + number % 4, number, mlp=number != 3)
        model = (await outcome(CreateModel(session, 0, "digits", spec))).model
        results = [await outcome(Compute(model, 1, works[number])), await outcome(OptimStep(model, 2, Adam(0.01)))]
        await stepped.wait()
        return [*results, await outcome(Compute(model, 3, works[number]))]

    gathered, barrier = Gathered(ranks, len(works)), asyncio.Barrier(len(works))
    async with Service(tmp_path / "together", gathered, FakeServers(), served) as service:
        together = await asyncio.gather(*(trained(service, gathered, each, barrier) for each in range(len(works))))
    gathered = Gathered(ranks, 1)
    async with Service(tmp_path / "alone", gathered, FakeServers(), served) as service:
        alone = [await trained(service, gathered, each, asyncio.Barrier(1)) for each in range(len(works))]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours[1] == theirs[1]
        for passed, expected in zip(ours[::2], theirs[::2], strict=True):
            assert passed.metrics == expected.metrics
            for output, wanted in zip(passed.outputs, expected.outputs, strict=True):
                assert output["logprobs"].tobytes() == wanted["logprobs"].tobytes()
    assert together[0][2].metrics["loss:sum"] < together[0][0].metrics["loss:sum"]
    # Ranks write what they have traced once a second.
    while sum(models := microbatches(tmp_path / "run" / "trace")) < 4 * len(works):
        await asyncio.sleep(0.1)
    shared, alone_models = models[: -2 * len(works)], models[-2 * len(works) :]
    assert sum(shared) == 2 * len(works) and alone_models == [1] * len(alone_models)
    # Each time those that had arrived when the first call was made, and all others.
    assert len(shared) <= 4
