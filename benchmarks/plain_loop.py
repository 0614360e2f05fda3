"""Reinforcement learning as a plain loop over the real trainer and one real server: generate, train, publish, repeat.

    python benchmarks/plain_loop.py CONFIG OUT [--lag K] [--one-by-one] [key=value ...]

It uses no Ray, no buffer and no router. Each batch is trained exactly K versions after it was sampled, whereas the lag
of a real asynchronous run varies. This makes the loop the control of the staleness experiment. `--one-by-one` generates
samples sequentially, as the reference for `max_staleness=0`. OUT receives a JSON object with the loss of each step, the
prompt and responses of each group in training order, and the held-out scores as [step, score].
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megasync.app.workload import PythonArguments, prepare_workload
from megasync.buffer.payload import in_memory
from megasync.config import Config, load_config
from megasync.device import resolve_device
from megasync.evaluation.evaluate import Answerer, evaluate
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.inflight import RequestGate
from megasync.rollout.workflow import SampleClient, request_seed
from megasync.serving.control import ServerControl
from megasync.serving.server import ServerSpec, SGLangServer
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.broadcast.sync import BroadcastSync
from megasync.trainer.rank import TrainerRank
from megasync.trajectory import Group, Prompt, Trajectory


class OneRank:
    """The only trainer rank. It runs on a separate thread because its collectives block."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._rank = TrainerRank(config, 0, 1, str(folder))
        self._thread = ThreadPoolExecutor(1)

    async def on_all(
        self, timeout: float | None, method: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        call = partial(getattr(self._rank, method.__name__), *args, **kwargs)
        work = asyncio.get_running_loop().run_in_executor(self._thread, call)
        return [await asyncio.wait_for(work, timeout)]


class PlainLoop:
    """The loop over one rank and one server. The configuration must have a single trainer rank."""

    def __init__(self, config: Config, folder: Path, lag: int, one_by_one: bool) -> None:
        self.config = config
        self._lag = lag
        self._one_by_one = one_by_one
        self._work = prepare_workload(config, PythonArguments())
        device = resolve_device("cpu")
        self._server = SGLangServer(
            ServerSpec(
                *(config.model.path, config.rollout, config.model.dtype, "cpu"),
                seed=config.seed,
                deterministic=config.rollout.deterministic,
            ),
            *("127.0.0.1", 0, folder / "server.log"),
            api_key="plain-loop",
        )
        self._rank = OneRank(config, folder)
        layout = Layout(read_hf_config(config.model.path), Topology(), device.spec)
        self._plan = plan_broadcast(layout, config.sync.bucket_mb * 2**20, config.model.dtype)
        self._device = device
        self._done: dict[str, list] = {"losses": [], "groups": [], "scores": []}

    async def run(self) -> dict[str, list]:
        config, work = self.config, self._work
        url = await self._server.start(config.timeouts.server_start)
        control = ServerControl(url, "plain-loop")
        model = ServedModel(work.vocab_size, work.context_length, work.tokenizer)
        self._client = RolloutClient(url, [control], model, RequestSettings(config.rollout.sampling, 60.0))
        sync = BroadcastSync([control], self._rank, self._plan, 1, config.sync, config.timeouts, self._device)
        try:
            ((host, port),) = await self._rank.on_all(None, TrainerRank.rendezvous)
            await self._rank.on_all(None, TrainerRank.start, host, port)
            waiting: deque[list[Group]] = deque()
            for step in range(1, config.schedule.total_steps + 1):
                while len(waiting) <= self._lag:
                    waiting.append(await self._batch())
                await self._train(waiting.popleft(), step)
                await sync.publish(step)
                if config.eval.every_steps and step % config.eval.every_steps == 0 and work.eval_sets:
                    await self._score(step)
            return self._done
        finally:
            await sync.close()
            await self._client.close()
            await control.close()
            await self._server.stop()

    async def _batch(self) -> list[Group]:
        prompts = [self._work.source.next() for _ in range(self.config.schedule.groups_per_step)]
        if self._one_by_one:
            return [await self._group(prompt) for prompt in prompts]
        return list(await asyncio.gather(*map(self._group, prompts)))

    async def _group(self, prompt: Prompt) -> Group:
        samples = range(self.config.schedule.samples_per_group)
        if self._one_by_one:
            found = [await self._sample(prompt, sample) for sample in samples]
        else:
            found = await asyncio.gather(*(self._sample(prompt, sample) for sample in samples))
        return Group(prompt.uid, await self._work.rewards.score(found, prompt.columns, prompt.uid))

    async def _sample(self, prompt: Prompt, sample: int) -> Trajectory:
        seed = request_seed(self.config.seed, prompt.uid, sample)
        client = SampleClient(self._client, RequestGate(), routing_key=prompt.uid, seed=seed)
        return await self._work.workflow(client, {"prompt_ids": prompt.prompt_ids})

    async def _train(self, groups: list[Group], step: int) -> None:
        (metrics,) = await self._rank.on_all(None, TrainerRank.step, list(map(in_memory, groups)), step, step - 1)
        expected = min(self._lag, step - 1)
        assert metrics["train/staleness_max"] == expected, (metrics["train/staleness_max"], expected)
        self._done["losses"].append(metrics.get("train/loss"))
        for group in groups:
            prompt = self._work.source.get(group.uid).columns["prompt"]
            self._done["groups"].append([prompt, [t.response_ids.tolist() for t in group.trajectories]])

    async def _score(self, step: int) -> None:
        held_out = replace(self._work.eval_sets[0], temperatures=(0.0,))
        (found,) = await evaluate(
            Answerer(self._client, self._work.workflow, [held_out]), [held_out], self.config.eval.max_inflight
        )
        self._done["scores"].append([step, found.score])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("out", type=Path)
    parser.add_argument("--lag", type=int, default=0, help="versions between sampling and training")
    parser.add_argument("--one-by-one", action="store_true", help="draw one sample after the other")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    config = load_config(given.config, given.overrides)
    with TemporaryDirectory(prefix="plain-loop-") as folder:
        found = asyncio.run(PlainLoop(config, Path(folder), given.lag, given.one_by_one).run())
    given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
