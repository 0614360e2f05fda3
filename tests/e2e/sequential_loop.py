"""Reinforcement learning as a plain loop: one prompt after the other, one sample after the other, then one step.

    python sequential_loop.py CONFIG OUT

No Ray, no buffer, no router, nothing concurrent: what `max_staleness=0` is compared with. Writes to OUT, as JSON, the
loss of each step and each group's prompt and responses in the order of training.
"""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megasync.buffer.trajectory import Group
from megasync.config import Config, load_config
from megasync.device import resolve_device
from megasync.rollout.client import RolloutClient
from megasync.rollout.control import ServerControl
from megasync.rollout.requests import RequestGate, SampleClient, request_seed
from megasync.rollout.rewards import RewardRunner
from megasync.rollout.server import SGLangServer
from megasync.sync.layout import Layout
from megasync.sync.plan import plan_broadcast
from megasync.sync.topology import Topology
from megasync.sync.transaction import WeightSync
from megasync.trainer.rank import TrainerRank
from megasync.workload import Custom, prepare_workload, read_hf_config


class OneRank:
    """The only trainer rank, on a thread of its own because its collectives block."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._rank = TrainerRank(config, 0, 1, str(folder))
        self._thread = ThreadPoolExecutor(1)

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        work = asyncio.get_running_loop().run_in_executor(self._thread, lambda: getattr(self._rank, method)(*args))
        return [await asyncio.wait_for(work, timeout)]


async def train(config: Config, folder: Path) -> dict[str, list]:
    work = prepare_workload(config, Custom())
    device = resolve_device("cpu")
    server = SGLangServer(
        config.model.path, config.rollout, config.model.dtype, "cpu", "127.0.0.1", 0, folder / "server.log", "key", 0, True
    )
    await server.start(300)
    rank, control = OneRank(config, folder), ServerControl(server.url, "key")
    client = RolloutClient(
        server.url, [control], work.vocab_size, work.context_length, config.rollout.sampling, 60, work.tokenizer
    )
    layout = Layout(read_hf_config(config.model.path), Topology(), device.spec)
    plan = plan_broadcast(layout, config.sync.bucket_mb * 2**20, config.model.dtype)
    sync = WeightSync([control], rank, plan, 1, config.sync, config.timeouts, device)
    rewards = RewardRunner(work.reward)
    done: dict[str, list] = {"losses": [], "groups": []}
    try:
        ((host, port),) = await rank.call("rendezvous")
        await rank.call("start", host, port)
        for step in range(1, config.schedule.total_steps + 1):
            groups = []
            for _ in range(config.schedule.groups_per_step):
                prompt = work.source.next()
                trajectories = []
                for sample in range(config.schedule.samples_per_group):
                    seed = request_seed(config.seed, prompt.uid, sample)
                    one = SampleClient(client, RequestGate(), routing_key=prompt.uid, seed=seed)
                    trajectories.append(await work.workflow(one, {"prompt_ids": prompt.prompt_ids}))
                groups.append(Group(prompt.uid, await rewards.score(trajectories, prompt.columns, prompt.uid)))
                done["groups"].append([prompt.columns["prompt"], [t.response_ids for t in trajectories]])
            (metrics,) = await rank.call("step", groups, step, step - 1)
            done["losses"].append(metrics.get("train/loss"))
            await sync.publish(step)
        return done
    finally:
        await sync.close()
        await client.close()
        await control.close()
        await server.stop()


if __name__ == "__main__":
    out = Path(sys.argv[2])
    found = asyncio.run(train(load_config(sys.argv[1]), out.parent))
    out.write_text(json.dumps(found))
