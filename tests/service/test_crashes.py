"""Every accepted request has exactly one effect, whatever dies: outcomes equal those of an undisturbed run.

The fakes compute with whole numbers that depend on the order and number of all requests before.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_fakes import SERVED, FakeServers, FakeTrainer, compute, create, save, snapshot, step

from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import RankLost
from megasync.service.encoding import encode
from megasync.service.requests import LoadWeights, Request, UnloadModel
from megasync.service.service import Service

SECONDS = 60

# By script and request.
Outcomes = dict[tuple[int, int], str]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one, because every commit is flushed to disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


@dataclass
class Fate:
    """What happens at which moment: before and after every transaction and every call of the ranks."""

    kills: frozenset[int] = frozenset()
    losses: frozenset[int] = frozenset()
    moment: int = 0
    # Moments at which ranks could be lost.
    calls: list[int] = field(default_factory=list)
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    async def pass_(self) -> None:
        """Hangs for ever from the moment of a kill on."""
        self.moment += 1
        if self.moment in self.kills:
            self.killed.set()
        if self.killed.is_set():
            await asyncio.Event().wait()

    async def write(self, call: Callable[[], Any]) -> Any:
        await self.pass_()
        result = call()
        await self.pass_()
        return result

    def lose(self, call: str) -> None:
        self.calls.append(self.moment)
        if self.moment in self.losses:
            self.losses -= {self.moment}
            raise RankLost(f"lost at {call}")


class MortalTrainer(FakeTrainer):
    """Its calls are moments at which the service may be killed, or the ranks lost."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self._fate = fate
        self.before = self.after = fate.lose


def mortal(name: str) -> Any:
    async def call(self: MortalTrainer, *arguments: Any) -> Any:
        await self._fate.pass_()
        result = await getattr(FakeTrainer, name)(self, *arguments)
        await self._fate.pass_()
        return result

    return call


for name in ("create", "compute", "update", "copy_state", "write", "load", "unload"):
    setattr(MortalTrainer, name, mortal(name))


@dataclass
class Script:
    """The requests of one model of a tenant, made when its session is known."""

    tenant: str
    requests: Callable[[str], list[Request]]
    # The order in which they are submitted, each at least once.
    order: Sequence[int]


def plain(outcome: Any, session: str) -> Any:
    """An outcome without what the session's random id has part in."""
    data = msgspec.msgpack.decode(encode(outcome))
    return repr(data).replace(session, "SESSION")


async def drive(folder: Path, scripts: Sequence[Script], fate: Fate) -> Outcomes:
    """Runs all scripts as clients that repeat everything after a kill. Returns the outcomes."""
    outcomes: Outcomes = {}
    accepted: dict[tuple[int, int], str] = {}

    async def client(service: Service, number: int, script: Script) -> None:
        session = await service.create_session(script.tenant, key=f"client {number}")
        requests = script.requests(session)
        promises: dict[int, str] = {}
        # What was given before a kill is known after it, whether or not it is asked for again.
        for (owner, _), promise in accepted.items():
            if owner == number:
                await service.outcome(script.tenant, promise, 0)
        # The first request makes the model.
        for index in (0, *script.order):
            if promises and not await service.outcome(script.tenant, promises[0], SECONDS):
                raise TimeoutError
            given = await service.submit(script.tenant, requests[index])
            assert promises.setdefault(index, given) == given == accepted.setdefault((number, index), given)
        for index, promise in sorted(promises.items()):
            outcome = await service.outcome(script.tenant, promise, SECONDS)
            assert outcome is not None, promise
            found = plain(outcome, session)
            assert outcomes.setdefault((number, index), found) == found

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    for life in itertools.count():
        fate.killed.clear()
        service = Service(
            folder, MortalTrainer(fate), FakeServers(), SERVED, restart_seconds=(0.0, 0.0), run=fate.write
        )
        await service.__aenter__()
        clients = asyncio.gather(*(client(service, number, script) for number, script in enumerate(scripts)))
        dead = asyncio.create_task(fate.killed.wait())
        await asyncio.wait({clients, dead}, return_when=asyncio.FIRST_COMPLETED)
        if clients.done():
            dead.cancel()
            await clients
            await service.__aexit__(None, None, None)
            return outcomes
        # Nothing of it acts anymore; only its files are left.
        clients.cancel()
        with suppress(asyncio.CancelledError):
            await clients
        await cancel_and_wait(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
        # The one thread ends what it had begun.
        await asyncio.to_thread(lambda: None)
        before, folder = folder, folder.with_name(f"life {life + 1}")
        shutil.copytree(before, folder)
    raise AssertionError


def quiet(folder: Path, scripts: Sequence[Script]) -> tuple[Outcomes, Fate]:
    """The outcomes of the scripts without any disturbance, each request once and in order."""
    straight = [Script(script.tenant, script.requests, sorted(set(script.order))) for script in scripts]
    fate = Fate()
    with tempfile.TemporaryDirectory(dir=folder) as run:
        return asyncio.run(drive(Path(run) / "life 0", straight, fate)), fate


def check(folder: Path, scripts: Sequence[Script], expected: Outcomes, kills: set[int], losses: set[int]) -> None:
    """Runs the scripts with these disturbances, and compares all that came of it."""
    with tempfile.TemporaryDirectory(dir=folder) as run:
        fate = Fate(frozenset(kills), frozenset(losses))
        assert asyncio.run(drive(Path(run) / "life 0", scripts, fate)) == expected
        check_left(max(Path(run).iterdir(), key=lambda path: int(path.name.split()[1])))


def check_left(folder: Path) -> None:
    """One state a model, and no body of a request that nothing needs."""
    with sqlite3.connect(folder / "service.db") as db:
        for target, kept in db.execute(
            "SELECT target, group_concat(seq) FROM promises WHERE request IS NOT NULL GROUP BY target"
        ):
            (last,) = db.execute(
                "SELECT max(seq) FROM promises WHERE target = ? AND outcome_type IN ('Updated', 'ModelReady')",
                (target,),
            ).fetchone()
            assert all(int(seq) > last for seq in kept.split(",")), (target, kept, last)
    states = folder / "states"
    for model in states.iterdir() if states.is_dir() else ():
        assert len(list(model.iterdir())) <= 1


def model_requests(kinds: Sequence[str], seed: int = 1, unload: bool = False) -> Callable[[str], list[Request]]:
    """One request of each kind, after the one that makes the model, with an optimizer step at the end."""

    def make(session: str) -> list[Request]:
        model = f"{session}:train:0"
        requests: list[Request] = [create(session, seed=seed)]
        for seq, kind in enumerate([*kinds, "step"], 1):
            match kind:
                case "pass":
                    requests.append(compute(model, seq, seq, seed))
                case "forward":
                    requests.append(compute(model, seq, seq, seed, backward=False))
                case "bad":
                    requests.append(compute(model, seq, loss="bad"))
                case "step":
                    requests.append(step(model, seq))
                case "skipped":
                    requests.append(step(model, seq, rate=-1.0))
                case "save":
                    requests.append(save(model, seq, "kept", overwrite=True))
                case "snapshot":
                    requests.append(snapshot(model, seq, sampler=seq))
                case "inflight":
                    requests.append(snapshot(model, seq, sampler=seq, inflight=True))
                case "load":
                    requests.append(LoadWeights(f"tinker://{model}/weights/kept", True, model, seq))
                case _:
                    raise ValueError(kind)
        if unload:
            requests.append(UnloadModel(model))
        return requests

    return make


EVERYTHING = ("pass", "pass", "step", "save", "pass", "bad", "step", "snapshot", "pass", "load", "forward", "pass")
TWO_TENANTS = (
    Script("a", model_requests(EVERYTHING), range(1, len(EVERYTHING) + 2)),
    Script(
        "b",
        model_requests(("pass", "step", "inflight", "pass", "skipped", "inflight"), seed=2, unload=True),
        range(1, 9),
    ),
)


def test_killed_at_every_moment(folder):
    expected, fate = quiet(folder, TWO_TENANTS)
    assert fate.moment > 80
    for moment in range(1, fate.moment + 1):
        check(folder, TWO_TENANTS, expected, {moment}, set())


def test_ranks_lost_at_every_call(folder):
    expected, fate = quiet(folder, TWO_TENANTS)
    assert len(fate.calls) > 40
    for call in sorted(set(fate.calls)):
        check(folder, TWO_TENANTS, expected, set(), {call})


KINDS = st.sampled_from(["pass", "pass", "forward", "step", "skipped", "save", "load", "snapshot", "inflight", "bad"])


@st.composite
def scripts(draw: st.DrawFn) -> list[Script]:
    made: list[Script] = []
    for number in range(draw(st.integers(1, 3))):
        kinds = draw(st.lists(KINDS, min_size=1, max_size=8))
        numbers = list(range(1, len(kinds) + 2))
        # Some are sent twice, all in any order.
        again = draw(st.lists(st.sampled_from(numbers), max_size=3))
        order = draw(st.permutations(numbers + again))
        made.append(Script(f"tenant {number % 2}", model_requests(kinds, seed=number + 1), order))
    return made


@settings(max_examples=30)
@given(
    scripts=scripts(), kills=st.sets(st.integers(1, 150), max_size=4), losses=st.sets(st.integers(1, 150), max_size=2)
)
def test_any_order_repeated_killed_and_lost(scripts, kills, losses):
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        check(Path(path), scripts, quiet(Path(path), scripts)[0], kills, losses)
