"""A trainer and servers that compute with whole numbers, so that order and repetition show in every result."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from megasync.base.files import new_folder
from megasync.errors import DataError, RankLost, TrainingError
from megasync.service.interfaces import (
    Adam,
    AdapterSpec,
    Datum,
    Newest,
    Pass,
    PassResult,
    SampledTokens,
    Samples,
    Sampling,
    ServedModel,
    WriteState,
)
from megasync.service.requests import Compute, CreateModel, OptimStep, SaveForSampler, SaveWeights

P = 2**31 - 1
SERVED = ServedModel("tiny", context=64, vocab=100, rank=8)


class FakeTrainer:
    """Weights, gradient and moment of a model are numbers. ``before`` and ``after`` each call may raise.

    ``writing`` is awaited before a state is written, which has the files ``beside`` its numbers.

    After a RankLost nothing works until the ranks are restarted, without any model.
    """

    def __init__(self) -> None:
        self.models: dict[str, dict[str, int]] = {}
        self.calls: list[tuple[str, ...]] = []
        self.before: Callable[[str], None] = lambda call: None
        self.after: Callable[[str], None] = lambda call: None
        self.writing: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        self.beside: dict[str, bytes] = {}
        self.lost = False

    async def create(self, model: str, spec: AdapterSpec) -> None:
        self._begin("create", model)
        self.models[model] = {"w": spec.seed * 1009 + spec.rank, "g": 0, "m": 1}
        self._end("create")

    async def compute(self, passes: Sequence[tuple[str, Pass]]) -> Sequence[PassResult | Exception]:
        self._begin("compute", *(model for model, _ in passes))
        results = [self._compute(self.models[model], work) for model, work in passes]
        self._end("compute")
        return results

    def _compute(self, state: dict[str, int], work: Pass) -> PassResult | Exception:
        if work.loss == "bad":
            return DataError("the loss is unknown")
        if work.loss == "broken":
            state["g"] += 1
            return TrainingError("it ran out of memory")
        outputs: list[Mapping[str, np.ndarray]] = []
        total = 0
        for datum in work.data:
            total = (total * 31 + int(datum.tokens.sum())) % P
            outputs.append({"logprobs": ((datum.tokens + state["w"]) % 97).astype(np.float32)})
        if work.backward:
            state["g"] = (state["g"] * 17 + total + 1) % P
        return PassResult(outputs, {"loss:sum": float((state["w"] + total) % P)})

    async def update(self, model: str, adam: Adam) -> Mapping[str, float]:
        self._begin("update", model)
        state = self.models[model]
        if adam.learning_rate < 0:
            state["g"] = 0
            self._end("update")
            return {"skipped:sum": 1.0}
        state["m"] = (state["m"] * 3 + state["g"]) % P
        state["w"] = (state["w"] * 5 + state["m"] + int(adam.learning_rate)) % P
        state["g"] = 0
        self._end("update")
        return {"w:last": float(state["w"])}

    async def copy_state(self, model: str, optimizer: bool) -> WriteState:
        self._begin("copy", model)
        kept = {name: self.models[model][name] for name in (("w", "m") if optimizer else ("w",))}
        self._end("copy")
        return partial(self.write, kept)

    async def write(self, kept: dict[str, int], folder: Path) -> None:
        await self.writing()
        with new_folder(folder) as draft:
            (draft / "state.json").write_text(json.dumps(kept))
            for name, content in self.beside.items():
                (draft / name).write_bytes(content)

    async def load(self, model: str, spec: AdapterSpec, folder: Path, optimizer: bool) -> None:
        self._begin("load", model)
        state = json.loads((folder / "state.json").read_text())
        self.models[model] = {"w": state["w"], "g": 0, "m": state["m"] if optimizer else 1}
        self._end("load")

    async def unload(self, model: str) -> None:
        self._begin("unload", model)
        self.models.pop(model, None)
        self._end("unload")

    async def restart(self) -> None:
        self.calls.append(("restart",))
        self.models, self.lost = {}, False

    def _begin(self, call: str, *models: str) -> None:
        self.calls.append((call, *models))
        if self.lost:
            raise RankLost("the ranks are gone")
        self._raising(self.before, call)

    def _end(self, call: str) -> None:
        self._raising(self.after, call)

    def _raising(self, hook: Callable[[str], None], call: str) -> None:
        try:
            hook(call)
        except RankLost:
            self.lost, self.models = True, {}
            raise


class FakeServers:
    """Samples the number in an adapter's folder; ``pause`` is awaited by each request first."""

    def __init__(self) -> None:
        self.adapters: dict[str, int] = {}
        self.offered: list[str] = []
        self.running = 0
        self.most = 0
        self.pause: asyncio.Event | None = None
        self._changed = asyncio.Condition()

    async def until(self, running: int) -> None:
        """Returns once so many requests run."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.running == running)

    async def _count(self, change: int) -> None:
        async with self._changed:
            self.running += change
            self.most = max(self.most, self.running)
            self._changed.notify_all()

    async def offer(self, adapter: str, folder: Path) -> None:
        assert adapter not in self.offered
        self.offered.append(adapter)
        self.adapters[adapter] = json.loads((folder / "state.json").read_text())["w"]

    async def withdraw(self, adapter: str) -> None:
        self.adapters.pop(adapter, None)

    async def sample(self, sampling: Sampling, adapter: str, newest: Newest | None = None) -> Samples:
        await self._count(1)
        try:
            if self.pause is not None:
                await self.pause.wait()
            seen = self.adapters[adapter] if adapter else 0
            ids = (np.arange(sampling.max_tokens or 1) + seen) % 97
            versions = [(adapter, 0, len(ids))]
            if newest is not None and (later := await newest()) != adapter:
                # The last token is of the newer one.
                versions = [(adapter, 0, len(ids) - 1), (later, len(ids) - 1, len(ids))]
            sample = SampledTokens(ids, np.zeros(len(ids), np.float32), False, versions)
            return Samples([sample] * sampling.samples)
        finally:
            await self._count(-1)


def batch(*tokens: int) -> list[Datum]:
    return [Datum(np.array(tokens or (1, 2, 3)), {})]


def create(session: str, seq: int = 0, seed: int = 1, rank: int = 4) -> CreateModel:
    return CreateModel(session, seq, "tiny", AdapterSpec(rank, seed))


def compute(model: str, seq: int, *tokens: int, backward: bool = True, loss: str = "cross_entropy") -> Compute:
    return Compute(model, seq, Pass(loss, {}, batch(*tokens), backward))


def step(model: str, seq: int, rate: float = 1.0) -> OptimStep:
    return OptimStep(model, seq, Adam(rate))


def save(model: str, seq: int, name: str | None = None, overwrite: bool = False) -> SaveWeights:
    return SaveWeights(model, seq, name, overwrite)


def snapshot(model: str, seq: int, sampler: int, inflight: bool = False) -> SaveForSampler:
    return SaveForSampler(model, seq, inflight=inflight, sampler_seq=sampler)
