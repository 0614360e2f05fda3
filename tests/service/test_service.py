"""What clients of the service can rely on: one promise a request, order, fairness, limits, and tenants apart."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_fakes import SERVED, FakeServers, FakeTrainer, batch, compute, create, save, snapshot, step

from megasync.errors import CheckpointError, DataError, LedgerError, RankLost
from megasync.layout.adapter import OPTIMIZER
from megasync.service import promises as promises_module
from megasync.service import saves as saves_module
from megasync.service import service as service_module
from megasync.service.interfaces import AdapterSpec, Datum, Pass, PassResult, Samples, Sampling
from megasync.service.limits import Limits
from megasync.service.requests import (
    Busy,
    Compute,
    CreateModel,
    Failed,
    Gone,
    LoadWeights,
    ModelReady,
    Outcome,
    Request,
    Sample,
    Saved,
    SaveForSampler,
    ServiceClosed,
    Unknown,
    UnloadModel,
    Updated,
)
from megasync.service.saved_files import check_files, read_files
from megasync.service.service import Service

SECONDS = 60


class Rig:
    """A service in a folder, with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer = FakeTrainer()
        self.servers = FakeServers()
        self.now = 1_000.0

    @asynccontextmanager
    async def open(self, **limits: Any) -> AsyncIterator[Service]:
        self.trainer.models.clear()
        self.servers = FakeServers()
        service = Service(
            self.folder, self.trainer, self.servers, SERVED, Limits(**limits), lambda: self.now, restart_seconds=(0, 0)
        )
        async with service:
            yield service

    def calls(self, *kinds: str) -> list[tuple[str, ...]]:
        return [call for call in self.trainer.calls if call[0] in kinds]


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path / "run")


async def result(service: Service, promise: str, tenant: str = "a") -> Outcome:
    outcome = await service.outcome(tenant, promise, SECONDS)
    assert outcome is not None
    return outcome


async def ask(service: Service, request: Request, tenant: str = "a") -> Outcome:
    return await result(service, await service.submit(tenant, request), tenant)


async def new_model(service: Service, tenant: str = "a", seed: int = 1) -> str:
    session = await service.create_session(tenant)
    made = await ask(service, create(session, seed=seed), tenant)
    assert isinstance(made, ModelReady)
    return made.model


async def new_sampler(service: Service, tenant: str = "a") -> str:
    return await service.create_sampler(tenant, await service.create_session(tenant), 0)


def sample(sampler: str | None = None, seq: int | None = None, path: str | None = None, tokens: int = 2) -> Sample:
    return Sample(Sampling(np.array([1, 2]), max_tokens=tokens), sampler, seq, path)


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


def first_id(outcome: Outcome) -> int:
    assert isinstance(outcome, Samples), outcome
    return int(outcome.samples[0].ids[0])


# Promises


async def test_same_number_is_the_same_promise(rig):
    async with rig.open() as service:
        model = await new_model(service)
        first, again = await asyncio.gather(*(service.submit("a", compute(model, 1)) for _ in range(2)))
        assert first == again
        await result(service, first)
        assert await service.submit("a", compute(model, 1)) == first
        with pytest.raises(DataError, match="another body"):
            await service.submit("a", compute(model, 1, 7))
        assert rig.calls("compute") == [("compute", model)]


async def test_same_key_is_the_same_promise_also_after_a_restart(rig):
    request = sample()
    async with rig.open() as service:
        await service.create_session("a")
        promise = await service.submit("a", request, key="k")
        assert await service.submit("a", request, key="k") == promise
        assert await service.submit("b", request, key="k") != promise
        with pytest.raises(DataError, match="another body"):
            await service.submit("a", sample(tokens=3), key="k")
        outcome = await result(service, promise)
    async with rig.open() as service:
        assert await service.submit("a", request, key="k") == promise
        assert first_id(await result(service, promise)) == first_id(outcome)


async def test_equal_bodies_in_another_order_are_equal(rig):
    async with rig.open() as service:
        model = await new_model(service)
        inputs = {"weights": np.ones(3, np.float32), "target_tokens": np.arange(3)}
        turned = dict(reversed(inputs.items()))
        passes = [Pass("cross_entropy", {}, [Datum(np.arange(3), given)], True) for given in (inputs, turned)]
        assert len({await service.submit("a", Compute(model, 1, work)) for work in passes}) == 1


async def test_outcomes_are_kept_within_limits_and_then_gone(rig):
    async with rig.open(kept=3, kept_seconds=100.0) as service:
        model = await new_model(service)
        made = [await service.submit("a", compute(model, seq)) for seq in range(1, 6)]
        await result(service, made[-1])
        for promise in made[:2]:
            with pytest.raises(Gone, match="no longer kept"):
                await service.outcome("a", promise, 0)
        # Exactly once, also when its outcome is not kept.
        assert await service.submit("a", compute(model, 1)) == made[0]
        for seq in range(6, 11):
            await ask(service, compute(model, seq, backward=False))
        with pytest.raises(Gone):
            await service.submit("a", compute(model, 6, backward=False))
        assert sum(call.count(model) for call in rig.calls("compute")) == 10
        rig.now += 101
        service.tidy()
        with pytest.raises(Gone):
            await service.outcome("a", f"{model}:10", 0)
    async with rig.open(kept=3) as service:
        # The gradients of what was forgotten are still there.
        before = rig.trainer.calls[:]
        assert isinstance(await ask(service, step(model, 11)), Updated)
        assert ("compute", *[model] * 5) in rig.trainer.calls[len(before) :]


async def test_closing_ends_waits_and_refuses(rig):
    rig.servers.pause = asyncio.Event()
    async with rig.open() as service:
        rig.servers.pause = asyncio.Event()
        sampler = await new_sampler(service)
        promise = await service.submit("a", sample(sampler, 0))
        waits = [
            asyncio.ensure_future(service.outcome("a", promise, SECONDS)),
            asyncio.ensure_future(service.completions("a", sampler, 0, 0, SECONDS)),
            asyncio.ensure_future(service.until_failed()),
        ]
        await asyncio.sleep(0)
    for wait in waits:
        with pytest.raises(ServiceClosed, match="shutting down"):
            await wait
    with pytest.raises(ServiceClosed):
        await service.submit("a", sample(sampler, 1))
    async with rig.open() as service:
        assert first_id(await result(service, promise)) == 0


async def test_one_service_holds_a_folder(rig, monkeypatch):
    monkeypatch.setattr(promises_module, "LOCK_SECONDS", 0.0)
    async with rig.open():
        with pytest.raises(LedgerError, match="another service"):
            Service(rig.folder, rig.trainer, rig.servers, SERVED)


# Order


async def test_a_request_that_others_wait_for_is_accepted_beyond_the_limits(rig):
    async with rig.open(tokens=10, pending=3) as service:
        model = await new_model(service)
        waiting = [await service.submit("a", compute(model, seq, *[1] * 5)) for seq in (2, 3)]
        with pytest.raises(Busy):
            await service.submit("a", compute(model, 4, *[1] * 5))
        assert not isinstance(await ask(service, compute(model, 1, *[1] * 5)), Failed)
        for promise in waiting:
            assert not isinstance(await result(service, promise), Failed)


async def test_a_missing_number_is_given_up_after_its_time(rig):
    async with rig.open(gap_seconds=10.0) as service:
        model = await new_model(service)
        late, later = await service.submit("a", compute(model, 2)), await service.submit("a", compute(model, 4))
        rig.now += 11
        service.tidy()
        failed = await result(service, late)
        assert isinstance(failed, Failed)
        assert "request 1" in failed.message
        assert "had no effect" in failed.message
        with pytest.raises(Gone):
            await service.submit("a", compute(model, 1))
        # The next gap has its own time.
        assert await service.outcome("a", later, 0) is None
        for outcome in (await ask(service, compute(model, 3)), await result(service, later)):
            assert not isinstance(outcome, Failed)
        assert sum(call.count(model) for call in rig.calls("compute")) == 2


async def test_a_refused_request_uses_up_its_number(rig):
    async with rig.open() as service:
        model = await new_model(service)
        with pytest.raises(DataError, match="token 100"):
            await service.submit("a", compute(model, 1, 100))
        await service.refuse("a", model, 2, "it is no protobuf")
        assert isinstance(await ask(service, step(model, 3)), Updated)
        assert rig.calls("compute") == []
    async with rig.open() as service:
        assert isinstance(await ask(service, step(model, 4)), Updated)


async def test_failures_of_a_pass_touch_no_other(rig):
    async with rig.open() as service:
        model, other = await new_model(service), await new_model(service, "b")
        made = [
            *[(await service.submit("a", compute(model, 1, loss="bad")), "a")],
            *[(await service.submit("b", compute(other, 1)), "b")],
            *[(await service.submit("a", compute(model, 2)), "a")],
        ]
        outcomes = [await result(service, promise, tenant) for promise, tenant in made]
        assert [isinstance(each, Failed) for each in outcomes] == [True, False, False]
        assert isinstance(outcomes[0], Failed)
        assert outcomes[0].category == "user"


async def test_a_pass_that_fails_halfway_leaves_nothing(rig):
    async with rig.open() as service:
        model, quiet = await new_model(service), await new_model(service)
        await ask(service, compute(quiet, 1))
        await ask(service, compute(model, 1))
        failed = await ask(service, compute(model, 2, loss="broken"))
        assert isinstance(failed, Failed)
        assert failed.category == "server"
        assert str(await ask(service, step(model, 3))) == str(await ask(service, step(quiet, 2)))
        assert service.status().restarts == 0


async def test_passes_of_several_tenants_go_to_the_ranks_together_and_fairly(rig):
    async with rig.open(batch=4_000) as service:
        mine, other = await new_model(service), await new_model(service, "b")
        held = asyncio.Event()
        run = rig.trainer.compute

        async def slow(passes: Any) -> Any:
            results = await run(passes)
            await held.wait()
            return results

        rig.trainer.compute = slow
        first = await service.submit("b", compute(other, 1))
        many = [await service.submit("a", compute(mine, seq)) for seq in range(1, 9)]
        few = await service.submit("b", compute(other, 2))
        held.set()
        await result(service, first, "b")
        await asyncio.gather(result(service, few, "b"), *(result(service, each) for each in many))
        batches = rig.calls("compute")
        assert batches[1].count(other) == 1
        assert sum(call.count(mine) for call in batches) == 8


# Ranks


async def test_a_request_that_kills_the_ranks_fails_alone(rig):
    async with rig.open() as service:
        model, other = await new_model(service), await new_model(service, "b")
        poison = 42
        original = rig.trainer._compute

        def explosive(state: Any, work: Pass) -> Any:
            if poison in work.data[0].tokens:
                rig.trainer.lost, rig.trainer.models = True, {}
                raise RankLost("a rank died")
            return original(state, work)

        rig.trainer._compute = explosive
        good = await service.submit("a", compute(model, 1))
        bad = await service.submit("a", compute(model, 2, poison))
        innocent = await service.submit("b", compute(other, 1))
        failed = await result(service, bad)
        assert isinstance(failed, Failed)
        assert "3 times" in failed.message
        for promise, tenant in ((good, "a"), (innocent, "b")):
            assert not isinstance(await result(service, promise, tenant), Failed)
        lost = await ask(service, step(model, 3))
        assert isinstance(lost, Updated)
        assert service.status().restarts == 3


async def test_ranks_that_do_not_start_stop_the_service_and_keep_promises(rig):
    async with rig.open() as service:
        model = await new_model(service)
        restart = rig.trainer.restart

        async def never() -> None:
            raise RankLost("no GPU is free")

        def lose(call: str) -> None:
            raise RankLost("gone")

        rig.trainer.restart, rig.trainer.before = never, lose
        promise = await service.submit("a", step(model, 1))
        with pytest.raises(ServiceClosed, match="no GPU is free"):
            await service.outcome("a", promise, SECONDS)
    rig.trainer.restart, rig.trainer.before, rig.trainer.lost = restart, lambda call: None, False
    async with rig.open() as service:
        assert isinstance(await result(service, promise), Updated)


async def test_an_error_of_the_service_itself_ends_every_wait(rig, monkeypatch):
    def broken(self: Any) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(service_module, "TIDY_SECONDS", 0.0)
    monkeypatch.setattr(Service, "tidy", broken)
    async with rig.open() as service:
        with pytest.raises(ServiceClosed, match="a mistake"):
            await service.until_failed()
        with pytest.raises(ServiceClosed, match="start it again"):
            await service.create_session("a")


async def test_gradients_that_cannot_be_made_again_fail_the_step_alone(rig):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, compute(model, 1))
    original = rig.trainer._compute
    rig.trainer._compute = lambda state, work: DataError("damaged")
    async with rig.open() as service:
        failed = await ask(service, step(model, 2))
        assert isinstance(failed, Failed)
        assert "gradients of requests 1 to 1 are lost" in failed.message
        rig.trainer._compute = original
        await ask(service, compute(model, 3))
        assert isinstance(await ask(service, step(model, 4)), Updated)


@pytest.mark.parametrize(("call", "message"), [("load", "cannot be brought back"), ("compute", "are lost")])
async def test_ranks_that_are_lost_whenever_a_model_is_restored_cost_one_request(rig, call, message):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, step(model, 1))
        await ask(service, compute(model, 2))
    left = 3

    def lose(name: str) -> None:
        nonlocal left
        if name == call and left:
            left -= 1
            raise RankLost("gone")

    rig.trainer.before = lose
    async with rig.open() as service:
        failed = await ask(service, step(model, 3))
        assert isinstance(failed, Failed)
        assert failed.category == "server"
        assert message in failed.message
        assert isinstance(await ask(service, step(model, 4)), Updated)
        assert service.status().restarts == 3


async def test_a_silent_session_leaves_the_ranks_and_comes_back(rig):
    async with rig.open(heartbeat_seconds=60.0) as service:
        model, quiet = await new_model(service), await new_model(service)
        for each in (model, quiet):
            await ask(service, compute(each, 1))
        rig.now += 50
        service.heartbeat("a", quiet.partition(":")[0])
        rig.now += 20
        service.tidy()
        while model in rig.trainer.models:
            await asyncio.sleep(0)
        assert quiet in rig.trainer.models
        outcomes = [await ask(service, step(each, 2)) for each in (model, quiet)]
        assert str(outcomes[0]) == str(outcomes[1])


# Checkpoints


async def test_a_checkpoint_goes_back_in_time_and_makes_other_models(rig):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, step(model, 1))
        assert await ask(service, save(model, 2, "one")) == Saved(path=f"tinker://{model}/weights/one")
        after = await ask(service, step(model, 3))
        path = f"tinker://{model}/weights/one"
        assert await ask(service, LoadWeights(path, True, model, 4)) == ModelReady(model, path)
        assert str(await ask(service, step(model, 5))) == str(after)
        session = model.partition(":")[0]
        twin = await ask(service, LoadWeights(path, True, session=session, model_seq=7))
        assert twin == ModelReady(f"{session}:train:7", path)
        assert str(await ask(service, step(f"{session}:train:7", 1))) == str(after)


async def test_a_damaged_checkpoint_is_not_loaded_and_nobody_restarts(rig):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, save(model, 1, "x"))
        (file,) = (rig.folder / "checkpoints").rglob("state.json")
        file.unlink()
        failed = await ask(service, LoadWeights(f"tinker://{model}/weights/x", True, model, 2))
        assert isinstance(failed, Failed)
        assert "cannot be loaded" in failed.message
        assert isinstance(await ask(service, step(model, 3)), Updated)
        (state,) = (rig.folder / "states").rglob("state.json")
    async with rig.open() as service:
        kept = state.read_text()
        state.unlink()
        for seq in (4, 5):
            failed = await ask(service, step(model, seq))
            assert isinstance(failed, Failed)
            assert "cannot be brought back from states/" in failed.message
        state.write_text(kept)
        assert isinstance(await ask(service, step(model, 6)), Updated)
        assert service.status().restarts == 0


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def exchange_files(one: Path, other: Path) -> None:
    exchange(one / "state.json", other / "state.json")


def link(one: Path, other: Path) -> None:
    """Applied twice it is undone, as an exchange is."""
    file, kept = one / "state.json", one.parents[2] / f"kept {one.parent.name} {one.name}"
    if kept.exists():
        kept.replace(file)
    else:
        file.rename(kept)
        file.symlink_to(other / "state.json")


async def two_models(service: Service) -> list[str]:
    """Models of one shape, each with a checkpoint, a snapshot, an inflight sampler, and a step after these."""
    models = [await new_model(service, seed=seed) for seed in (1, 2)]
    for model in models:
        await ask(service, step(model, 1))
        await ask(service, save(model, 2, "x"))
        for number, inflight in enumerate((False, True)):
            await ask(service, snapshot(model, 3 + number, number, inflight))
        await ask(service, step(model, 5))
    return models


def of_requests(rig: Rig, kind: str, models: Sequence[str], number: int) -> list[Path]:
    """The folders that this request of each model made."""
    return [rig.folder / kind / model.replace(":", "-") / str(number) for model in models]


@pytest.mark.parametrize("exchanged", [exchange, exchange_files, link])
async def test_a_state_that_is_another_models_is_refused_and_stays(rig, exchanged):
    async with rig.open() as service:
        models = await two_models(service)
    states = of_requests(rig, "states", models, 5)
    exchanged(*states)
    harmed = [(state / "state.json").read_text() for state in states]
    wrong = models[:1] if exchanged is link else models
    async with rig.open() as service:
        for model in wrong:
            for request in (compute(model, 6), step(model, 7), save(model, 8, "y")):
                failed = await ask(service, request)
                assert isinstance(failed, Failed) and failed.category == "server"
                assert "/5/state.json is not the file that the service wrote there" in failed.message
        await fall_silent(rig, service)
        assert [session.ended for session in service.sessions("a")].count("") == len(wrong)
        assert service.status().restarts == 0
    assert [(state / "state.json").read_text() for state in states[: len(wrong)]] == harmed[: len(wrong)]
    exchanged(*states)
    async with rig.open() as service:
        for model in wrong:
            assert isinstance(await ask(service, step(model, 9)), Updated)


async def test_an_older_state_of_a_model_is_refused_and_stays(rig):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, step(model, 1))
        older = next((rig.folder / "states").rglob("state.json")).read_text()
        await ask(service, step(model, 2))
    (file,) = (rig.folder / "states").rglob("state.json")
    newer = file.read_text()
    file.write_text(older)
    async with rig.open() as service:
        failed = await ask(service, step(model, 3))
        assert isinstance(failed, Failed) and "an older one" in failed.message
        assert file.read_text() == older
        file.write_text(newer)
        assert isinstance(await ask(service, step(model, 4)), Updated)


@pytest.mark.parametrize("exchanged", [exchange, exchange_files, link])
async def test_what_was_saved_of_another_model_is_neither_loaded_sampled_nor_given_out(rig, exchanged):
    async with rig.open() as service:
        models = await two_models(service)
    saved = [of_requests(rig, "checkpoints", models, number) for number in (2, 3, 4)]
    for folders in saved:
        exchanged(*folders)
    (model, _), refused = models, "/state.json is not the file that the service wrote there"
    path, samplers = f"tinker://{model}/weights/x", [f"{model.partition(':')[0]}:sample:{number}" for number in (0, 1)]
    async with rig.open() as service:
        failed = [await ask(service, LoadWeights(path, True, model, 6)), await ask(service, sample(path=path))]
        failed += [await ask(service, sample(sampler, 0)) for sampler in samplers]
        for each in failed:
            assert isinstance(each, Failed) and refused in each.message
        for file in (None, "state.json"):
            with pytest.raises(CheckpointError, match=refused):
                async with service.folder("a", path, file):
                    pass
        assert not rig.servers.offered
        for folders in saved:
            exchanged(*folders)
        assert await ask(service, LoadWeights(path, True, model, 7)) == ModelReady(model, path)
        for sampler in samplers:
            assert isinstance(await ask(service, sample(sampler, 1)), Samples)
        async with service.folder("a", path) as (folder, files):
            assert folder == saved[0][0] and [*files.described] == ["state.json"]


def test_files_are_compared_one_by_one(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    files = read_files(tmp_path)
    assert files.size == 6
    (tmp_path / ".nfs01").touch()
    check_files(tmp_path, files)
    (tmp_path / "two").write_text("own")
    check_files(tmp_path, files.without("two"), others=["two"])
    with pytest.raises(CheckpointError, match=r"/two is not the file"):
        check_files(tmp_path, files)
    with pytest.raises(CheckpointError, match=r"/two was not written by the service"):
        check_files(tmp_path, files.without("two"))
    (tmp_path / "two").unlink()
    with pytest.raises(CheckpointError, match=r"/two is missing"):
        check_files(tmp_path, files)


async def test_names_are_taken_once_unless_overwritten(rig):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, save(model, 1, "x"))
        exists = await ask(service, save(model, 2, "x"))
        assert isinstance(exists, Failed)
        assert "overwrite" in exists.message
        await ask(service, step(model, 3))
        await ask(service, save(model, 4, "x", overwrite=True))
        assert [c.adapter for c in service.checkpoints("a")] == [f"{model.replace(':', '-')}-4"]
        await ask(service, save(model, 5))
        assert service.checkpoint("a", f"tinker://{model}/weights/5").name == "5"
    assert sorted(path.name for path in (rig.folder / "checkpoints").glob("*/*")) == ["4", "5"]


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 200, "a b", "ü"])
async def test_names_lead_nowhere_else(rig, name):
    async with rig.open() as service:
        model = await new_model(service)
        for request in (save(model, 1, name), SaveForSampler(model, 2, name)):
            if name or isinstance(request, SaveForSampler):
                with pytest.raises(DataError, match="cannot name a checkpoint"):
                    await service.submit("a", request)
        for path in (f"tinker://{model}/weights/{name}", "tinker://../../etc/passwd", f"/{name}"):
            with pytest.raises(Unknown):
                service.checkpoint("a", path)


async def test_checkpoints_expire_and_are_deleted(rig):
    async with rig.open() as service:
        model = await new_model(service)
        paths = [f"tinker://{model}/weights/{name}" for name in ("x", "y")]
        for seq, name in ((1, "x"), (2, "y")):
            await ask(service, save(model, seq, name))
        with pytest.raises(DataError, match="cannot live for 5 s"):
            await service.set_ttl("a", paths[0], 5)
        await service.set_ttl("a", paths[0], 3600)
        await service.delete_checkpoint("a", paths[1])
        rig.now += 3601
        service.tidy()
        assert service.checkpoints("a", model) == []
    async with rig.open() as service:
        assert service.checkpoints("a") == []
        assert list((rig.folder / "checkpoints").glob("*/*")) == []


async def test_other_models_go_on_while_a_state_is_written_and_its_own_requests_wait(rig):
    """The outcome waits for the file, and so does what the same model does next."""
    writing, held = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        writing.set()
        await held.wait()

    async with rig.open() as service:
        model, other = await new_model(service), await new_model(service, "b")
        rig.trainer.writing = slow
        stepped = await service.submit("a", step(model, 1))
        await writing.wait()
        own = await service.submit("a", compute(model, 2))
        assert isinstance(await ask(service, compute(other, 1), "b"), PassResult)
        assert await service.outcome("a", stepped, 0) is None and await service.outcome("a", own, 0) is None
        assert all(model not in call for call in rig.calls("compute"))
        # Those of a model that ends meanwhile: what runs has its effect.
        await service.finish_session("a", model.partition(":")[0], "success")
        held.set()
        assert isinstance(await result(service, stepped), Updated)
        assert isinstance(await result(service, own), Failed)


async def test_a_service_that_closes_ends_the_saves_that_it_began(rig):
    writing = asyncio.Event()

    async def slow() -> None:
        writing.set()
        # Until the service is closing.
        while not service._promises.failure:
            await asyncio.sleep(0)

    async with rig.open() as service:
        model = await new_model(service)
        rig.trainer.writing = slow
        stepped = await service.submit("a", step(model, 1))
        await writing.wait()
    calls = len(rig.calls("update"))
    async with rig.open() as service:
        assert isinstance(await result(service, stepped), Updated)
        assert len(rig.calls("update")) == calls


async def test_what_is_saved_after_a_step_is_its_state_and_asks_nothing_of_the_ranks(rig, monkeypatch):
    rig.trainer.beside = {OPTIMIZER: b"moments"}
    async with rig.open() as service:
        model = await new_model(service)
        updated = await ask(service, step(model, 1))
        assert isinstance(updated, Updated)
        service._training.evict(model)
        while service._training.find(model).resident:
            await asyncio.sleep(0)
        calls = len(rig.trainer.calls)
        saved = [await ask(service, save(model, 2, "x")), await ask(service, snapshot(model, 3, 0))]
        monkeypatch.setattr(Path, "hardlink_to", failing)
        saved += [await ask(service, save(model, 4, "y")), await ask(service, snapshot(model, 5, 1))]
        assert len(rig.trainer.calls) == calls
        with_moments = [(folder / OPTIMIZER).exists() for folder in sorted((rig.folder / "checkpoints").glob("*/*"))]
        assert with_moments == [True, False] * 2
        for each in saved[1::2]:
            assert first_id(await ask(service, sample(each.sampler, 0))) == updated.metrics["w:last"] % 97
        # The files outlive the state's folder.
        await ask(service, step(model, 6))
        await ask(service, LoadWeights(saved[0].path, True, model, 7))
        again = await ask(service, step(model, 8))
        await ask(service, LoadWeights(saved[2].path, True, model, 9))
        assert (await ask(service, step(model, 10))).metrics == again.metrics


def failing(*_: object) -> None:
    raise OSError("no links here")


async def test_two_models_cannot_make_the_same_sampler(rig):
    held = asyncio.Event()
    async with rig.open() as service:
        model = await new_model(service)
        session = model.partition(":")[0]
        other = session + ":train:1"
        await ask(service, create(session, 1))
        rig.trainer.writing = held.wait
        promises = [await service.submit("a", snapshot(each, 1, 7)) for each in (model, other)]
        while len(rig.calls("copy")) < 2:
            await asyncio.sleep(0)
        held.set()
        # The first whose folder is written.
        outcomes = [await result(service, promise) for promise in promises]
        (refused,) = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        assert sum(isinstance(outcome, Saved) for outcome in outcomes) == 1
        assert "sampler number 7 already" in refused.message


@pytest.mark.parametrize("error", [ValueError("no space left"), OSError(28, "no space left")])
async def test_a_full_disk_fails_only_the_request_that_needs_it(rig, error):
    async def full() -> None:
        raise error

    async with rig.open() as service:
        model, quiet = await new_model(service), await new_model(service)
        for each in (model, quiet):
            await ask(service, compute(each, 1))
        working, rig.trainer.writing = rig.trainer.writing, full
        for request in (step(model, 2), save(model, 3, "x"), snapshot(model, 4, 0)):
            failed = await ask(service, request)
            assert isinstance(failed, Failed)
            assert "no space left" in failed.message
        rig.trainer.writing = working
        assert service.checkpoints("a") == []
        # The step had no effect, and the gradients are still there.
        assert str(await ask(service, step(model, 5))) == str(await ask(service, step(quiet, 2)))
        assert service.status().restarts == 0


async def test_a_step_to_weights_that_are_not_finite_is_refused_and_the_model_stays(rig):
    async def overflowed() -> None:
        raise DataError("w would have values that are not finite")

    async with rig.open() as service:
        model, quiet = await new_model(service), await new_model(service)
        for each in (model, quiet):
            await ask(service, step(each, 1, 3.0))
            await ask(service, compute(each, 2))
        working, rig.trainer.writing = rig.trainer.writing, overflowed
        failed = await ask(service, step(model, 3))
        assert isinstance(failed, Failed) and failed.category == "user" and "not finite" in failed.message
        rig.trainer.writing = working
        assert str(await ask(service, step(model, 4))) == str(await ask(service, step(quiet, 3)))


async def test_a_record_without_room_refuses_new_requests_and_delays_outcomes(rig, monkeypatch):
    monkeypatch.setattr(promises_module, "FULL_DISK_SECONDS", 0.001)
    connections: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connections.append(connect(*arguments, **options))
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", connected)
    async with rig.open() as service:
        model = await new_model(service)
        held = asyncio.Event()
        update = rig.trainer.update

        async def slow(name: str, adam: Any) -> Any:
            await held.wait()
            return await update(name, adam)

        rig.trainer.update = slow
        promise = await service.submit("a", step(model, 1))
        (pages,) = connections[0].execute("PRAGMA page_count").fetchone()
        connections[0].execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(Busy, match="cannot be recorded"):
            await service.submit("a", Compute(model, 2, Pass("cross_entropy", {}, batch(*[1] * 60) * 100, True)))
        held.set()
        connections[0].execute("PRAGMA max_page_count=1000000")
        assert isinstance(await result(service, promise), Updated)
        # Its number is not used up.
        assert not isinstance(await ask(service, compute(model, 2)), Failed)


async def test_deleting_makes_room_on_a_full_disk(rig, monkeypatch):
    monkeypatch.setattr(promises_module, "FULL_DISK_SECONDS", 0.001)

    def full(self: Any, calls: Sequence[Any]) -> list[Any]:
        if not list((rig.folder / "checkpoints").glob("*/1")):
            return transact(self, calls)
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        return [error] * len(calls)

    transact = promises_module.Store._transact
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, save(model, 1, "x"))
        monkeypatch.setattr(promises_module.Store, "_transact", full)
        with pytest.raises(Busy, match="full"):
            await service.submit("a", step(model, 2))
        await service.delete_checkpoint("a", f"tinker://{model}/weights/x")
        assert isinstance(await ask(service, step(model, 2)), Updated)
        assert service.checkpoints("a") == []


# Samplers


async def test_snapshots_stay_and_inflight_samplers_follow(rig):
    async with rig.open() as service:
        model = await new_model(service)
        saved = [await ask(service, snapshot(model, 1, 0)), await ask(service, snapshot(model, 2, 1, inflight=True))]
        fixed, moving = [each.sampler for each in saved if isinstance(each, Saved)]
        assert fixed and moving
        before = first_id(await ask(service, sample(fixed, 0)))
        assert first_id(await ask(service, sample(moving, 0))) == before
        updated = await ask(service, step(model, 3))
        assert isinstance(updated, Updated)
        await ask(service, snapshot(model, 4, 2, inflight=True))
        assert first_id(await ask(service, sample(fixed, 1))) == before
        assert first_id(await ask(service, sample(moving, 1))) == updated.metrics["w:last"] % 97
        while len(rig.servers.adapters) > 2:
            await asyncio.sleep(0)
        assert len(rig.servers.offered) == 3
    async with rig.open() as service:
        assert first_id(await ask(service, sample(fixed, 2))) == before
        assert first_id(await ask(service, sample(moving, 2))) == updated.metrics["w:last"] % 97


async def test_a_sample_goes_on_with_the_newest_adapter_and_after_the_end_of_its_model_with_the_last(rig):
    async with rig.open() as service:
        model = await new_model(service)
        samplers = [(await ask(service, snapshot(model, seq, seq, inflight=seq == 2))).sampler for seq in (1, 2)]
        rig.servers.pause = asyncio.Event()
        promises = [await service.submit("a", sample(sampler, 0)) for sampler in samplers]
        await rig.servers.until(2)
        await ask(service, step(model, 3))
        await ask(service, snapshot(model, 4, 3, inflight=True))
        rig.servers.pause.set()
        fixed, moving = [(await result(service, promise)).samples[0].versions for promise in promises]
        assert [(first, end) for _, first, end in fixed] == [(0, 2)]
        assert [(first, end) for _, first, end in moving] == [(0, 1), (1, 2)]
        assert moving[0][0] not in rig.servers.adapters and moving[1][0] in rig.servers.adapters
        rig.servers.pause.clear()
        promise = await service.submit("a", sample(samplers[1], 1))
        await rig.servers.until(1)
        await service.finish_session("a", model.partition(":")[0], "success")
        rig.servers.pause.set()
        assert (await result(service, promise)).samples[0].versions == [(moving[1][0], 0, 2)]


async def test_an_adapter_in_use_outlives_its_checkpoint(rig):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, save(model, 1, "x"))
        path = f"tinker://{model}/weights/x"
        rig.servers.pause = asyncio.Event()
        promise = await service.submit("a", sample(path=path))
        await rig.servers.until(1)
        await service.delete_checkpoint("a", path)
        assert list((rig.folder / "checkpoints").glob("*/1"))
        rig.servers.pause.set()
        assert isinstance(await result(service, promise), Samples)
        await asyncio.gather(*service._adapters._tasks)
        assert not list((rig.folder / "checkpoints").glob("*/1"))
        with pytest.raises(Unknown):
            await service.submit("a", sample(path=path))


async def test_the_oldest_unused_snapshot_ends_beyond_the_limit(rig):
    async with rig.open(adapters=2) as service:
        model = await new_model(service)
        samplers = []
        for seq in (1, 2):
            saved = await ask(service, snapshot(model, seq, seq))
            assert isinstance(saved, Saved)
            samplers.append(saved.sampler or "")
        await ask(service, sample(samplers[0], 0))
        await ask(service, snapshot(model, 3, 3))
        assert isinstance(await ask(service, sample(samplers[0], 1)), Samples)
        with pytest.raises(Gone, match="adapters=2"):
            await service.submit("a", sample(samplers[1], 0))


async def test_completions_come_in_order_with_a_cursor(rig):
    async with rig.open() as service:
        sampler = await new_sampler(service)
        assert await service.join_sampler("a", sampler) == 1
        assert await service.join_sampler("a", sampler) == 2
        assert await service.completions("a", sampler, 0, 0, 0) == ([], 0)
        promises = [await service.submit("a", sample(sampler, seq)) for seq in range(3)]
        other = await service.submit("a", sample(sampler, 2_000_000_000))
        for promise in (*promises, other):
            await result(service, promise)
        done, cursor = await service.completions("a", sampler, 0, 0, SECONDS)
        assert sorted(done) == [(promise, False) for promise in promises]
        assert (await service.completions("a", sampler, 2, 0, 0))[0] == [(other, False)]
        wait = asyncio.ensure_future(service.completions("a", sampler, 0, cursor, SECONDS, [promises[0]]))
        late = await service.submit("a", sample(sampler, 3))
        assert (await wait)[0] == [(late, False)]
        with pytest.raises(Gone):
            await service.outcome("a", promises[0], 0)
        after = (await wait)[1]
        assert after > cursor
    async with rig.open() as service:
        assert await service.completions("a", sampler, 0, cursor, 0) == ([(late, False)], after)
        newest = await service.submit("a", sample(sampler, 4))
        assert (await service.completions("a", sampler, 0, after, SECONDS))[0] == [(newest, False)]
        assert await service.join_sampler("a", sampler) == 3


async def test_a_cursor_stays_true_when_all_that_it_counted_is_forgotten(rig):
    async with rig.open() as service:
        sampler = await new_sampler(service)
        promise = await service.submit("a", sample(sampler, 0))
        _, cursor = await service.completions("a", sampler, 0, 0, SECONDS)
        assert await service.completions("a", sampler, 0, cursor, 0, [promise]) == ([], cursor)
    async with rig.open() as service:
        promise = await service.submit("a", sample(sampler, 1))
        await result(service, promise)
        assert (await service.completions("a", sampler, 0, cursor, 0))[0] == [(promise, False)]


async def test_samples_run_together_up_to_a_number_per_tenant_and_are_cancelled(rig):
    async with rig.open(samples=2) as service:
        rig.servers.pause = asyncio.Event()
        sampler = await new_sampler(service)
        promises = [await service.submit("a", sample(sampler, seq)) for seq in range(4)]
        other = await service.submit("b", sample())
        await rig.servers.until(3)
        service.cancel("a", promises[0])
        service.cancel("a", promises[3])
        for promise in (promises[0], promises[3]):
            failed = await result(service, promise)
            assert isinstance(failed, Failed)
            assert "cancelled" in failed.message
        rig.servers.pause.set()
        for promise in promises[1:3]:
            assert isinstance(await result(service, promise), Samples)
        await result(service, other, "b")
        assert rig.servers.most == 3


async def test_a_sample_is_cancelled_at_any_moment(rig):
    """Also between the moment when it is recorded and its first step."""
    async with rig.open() as service:
        rig.servers.pause = asyncio.Event()
        sampler = await new_sampler(service)
        for moment in range(8):
            promise = f"{sampler}:{moment}"
            asked = asyncio.ensure_future(service.submit("a", sample(sampler, moment)))
            while promise not in service._samplers._tasks:
                await asyncio.sleep(0)
            for _ in range(moment):
                await asyncio.sleep(0)
            service.cancel("a", promise)
            assert await asked == promise
            assert "cancelled" in (await result(service, promise)).message
        assert service.status().tenants["a"].pending == 0


# Sessions, tenants, limits


@pytest.mark.parametrize("inflight", [False, True])
async def test_a_sampler_that_is_saved_when_its_session_ends_is_not_made(rig, inflight):
    writing = asyncio.Event()
    async with rig.open() as service:
        model = await new_model(service)
        session = model.partition(":")[0]
        rig.trainer.writing = writing.wait
        promise = await service.submit("a", snapshot(model, 1, 0, inflight))
        while not service._training.find(model).saving:
            await asyncio.sleep(0)
        await service.finish_session("a", session, "success")
        writing.set()
        failed = await result(service, promise)
        assert isinstance(failed, Failed) and "was finished" in failed.message
        assert service.session("a", session).samplers == []
        assert service.status().tenants["a"].disk == 0
        await asyncio.gather(*service._adapters._tasks)
        assert not list((rig.folder / "checkpoints").glob("*/*"))


async def test_finishing_a_session_ends_what_it_made_but_checkpoints(rig):
    async with rig.open() as service:
        model = await new_model(service)
        session = model.partition(":")[0]
        saved = await ask(service, snapshot(model, 1, 0))
        await ask(service, save(model, 2, "x"))
        assert isinstance(saved, Saved)
        assert service.session("a", session).models == [model]
        assert service.session("a", session).samplers == [saved.sampler]
        waiting = await service.submit("a", compute(model, 4))
        await service.finish_session("a", session, "success", "done")
        await service.finish_session("a", session, "errored")
        assert service.session("a", session).ended == "success"
        assert isinstance(await result(service, waiting), Failed)
        for request in (compute(model, 3), sample(saved.sampler, 0), create(session, 1)):
            with pytest.raises(Gone):
                await service.submit("a", request)
        with pytest.raises(Gone):
            service.heartbeat("a", session)
        while not service._training.gone(model):
            await asyncio.sleep(0)
        assert model not in rig.trainer.models and not list((rig.folder / "states").glob("*/*"))
        assert [c.name for c in service.checkpoints("a")] == ["x"]
    async with rig.open() as service:
        assert service.session("a", session).models == [model]


async def test_ended_sessions_are_forgotten_with_all_they_had_unless_checkpoints_are_left(rig):
    async with rig.open() as service:
        kept, bare = await new_model(service), await new_model(service)
        await ask(service, save(kept, 1, "x"))
        await ask(service, snapshot(bare, 1, 0))
        for model in (kept, bare):
            await service.finish_session("a", model.partition(":")[0], "success")
        living = await new_model(service, "b")
        while any(not service._training.gone(model) for model in (kept, bare)):
            await asyncio.sleep(0)
        rig.now += service.limits.kept_seconds - 1
        service.tidy()
        assert len(service.sessions("a")) == 2
        rig.now += 2
        service.tidy()
        assert [session.models for session in service.sessions("a")] == [[kept]]
        with pytest.raises(Unknown):
            service.model("a", bare)
    async with rig.open() as service:
        assert [session.models for session in service.sessions("a")] == [[kept]]
        assert service.model("b", living).ended == ""
        await service.delete_checkpoint("a", f"tinker://{kept}/weights/x")
        rig.now += service.limits.kept_seconds + 1
        service.tidy()
        assert service.sessions("a") == []
    async with rig.open() as service:
        assert service.sessions("a") == [] and len(service.sessions("b")) == 1


async def fall_silent(rig: Rig, service: Service) -> None:
    """Passes the time after which silent sessions end."""
    rig.now += service.limits.heartbeat_seconds + 1
    service.tidy()
    rig.now += service.limits.silent_seconds
    await service._sessions.end_silent()


async def test_a_silent_session_ends_and_its_unsaved_state_is_a_checkpoint_for_a_time(rig):
    async with rig.open() as service:
        unsaved, saved, fresh = [await new_model(service) for _ in range(3)]
        for model in (unsaved, saved):
            await ask(service, step(model, 1))
            await ask(service, compute(model, 2))
        await ask(service, save(saved, 3, "x"))
        await ask(service, snapshot(unsaved, 3, 0))
        rig.now += service.limits.heartbeat_seconds + 1
        service.tidy()
        living = await new_model(service)
        rig.now += service.limits.silent_seconds - service.limits.heartbeat_seconds - 2
        await service._sessions.end_silent()
        assert not any(model.ended for model in service.models("a"))
    # Neither the time nor the state depends on the process.
    async with rig.open() as service:
        rig.now += 2
        await service._sessions.end_silent()
        assert {model.id for model in service.models("a") if not model.ended} == {living}
        for model in (unsaved, saved, fresh):
            session = service.session("a", model.partition(":")[0])
            assert session.ended == "interrupted" and session.detail is not None and "3.0 days" in session.detail
            with pytest.raises(Gone, match="begin a new one"):
                service.heartbeat("a", session.id)
        path = f"tinker://{unsaved}/weights/silent-1"
        assert {each.path for each in service.checkpoints("a")} == {path, f"tinker://{saved}/weights/x"}
        assert service.status().tenants["a"].snapshots == 0
        session = living.partition(":")[0]
        again = await ask(service, LoadWeights(path, True, session=session, model_seq=1))
        assert again == ModelReady(f"{session}:train:1", path)
        twin = await ask(service, LoadWeights(f"tinker://{saved}/weights/x", True, session=session, model_seq=2))
        assert isinstance(twin, ModelReady)
        assert str(await ask(service, step(again.model, 1))) == str(await ask(service, step(twin.model, 1)))
        rig.now += service.limits.silent_kept_seconds + 1
        service.heartbeat("a", session)
        service.tidy()
        assert {each.path for each in service.checkpoints("a")} == {f"tinker://{saved}/weights/x"}
        rig.now += service.limits.kept_seconds
        service.heartbeat("a", session)
        service.tidy()
        assert {each.id for each in service.sessions("a")} == {session, saved.partition(":")[0]}
        # The steps of what is forgotten count.
        assert service.status().tenants["a"].steps == 4
    async with rig.open() as service:
        assert service.status().tenants["a"].steps == 4


async def test_a_model_whose_state_is_lost_goes_on_with_a_checkpoint_and_its_session_ends(rig):
    async with rig.open() as service:
        lost = [await new_model(service) for _ in range(2)]
        for model in lost:
            await ask(service, save(model, 1, "x"))
            await ask(service, step(model, 2))
    shutil.rmtree(rig.folder / "states")
    async with rig.open() as service:
        failed = await ask(service, compute(lost[0], 3))
        assert isinstance(failed, Failed) and "load a checkpoint" in failed.message
        path = f"tinker://{lost[0]}/weights/x"
        assert await ask(service, LoadWeights(path, True, lost[0], 4)) == ModelReady(lost[0], path)
        assert isinstance(await ask(service, step(lost[0], 5)), Updated)
        await fall_silent(rig, service)
        assert {session.ended for session in service.sessions("a")} == {"interrupted"}
        assert {each.path for each in service.checkpoints("a")} == {
            *(f"tinker://{model}/weights/x" for model in lost),
            f"tinker://{lost[0]}/weights/silent-5",
        }


async def test_a_session_that_shows_life_again_goes_on_as_if_it_had_never_been_silent(rig):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, step(model, 1))
        rig.now += service.limits.heartbeat_seconds + 1
        service.tidy()
        assert service.status().tenants["a"].sessions == 0
        service.heartbeat("a", model.partition(":")[0])
        assert service.status().tenants["a"].sessions == 1
    async with rig.open() as service:
        rig.now += service.limits.silent_seconds
        await service._sessions.end_silent()
        assert isinstance(await ask(service, step(model, 2)), Updated)
        await fall_silent(rig, service)
        assert service.session("a", model.partition(":")[0]).ended == "interrupted"


async def test_a_silent_session_whose_state_cannot_be_kept_does_not_end(rig, monkeypatch):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, step(model, 1))
        with monkeypatch.context() as full:
            full.setattr(saves_module, "_link", raising(OSError(errno.ENOSPC, "No space left on device")))
            await fall_silent(rig, service)
            assert service.session("a", model.partition(":")[0]).ended == ""
        await service._sessions.end_silent()
        assert service.session("a", model.partition(":")[0]).ended == "interrupted"
        assert [each.name for each in service.checkpoints("a")] == ["silent-1"]


async def test_the_record_has_a_bounded_number_of_sessions(rig):
    async with rig.open(records=4) as service:
        used = await new_model(service)
        kept = await new_model(service)
        await ask(service, save(kept, 1, "x"))
        await service.finish_session("a", kept.partition(":")[0], "success")
        ended, silent = await service.create_session("a"), await service.create_session("a")
        await service.finish_session("a", ended, "success")
        rig.now += service.limits.heartbeat_seconds + 1
        service.heartbeat("a", used.partition(":")[0])
        service.tidy()
        for _ in range(2):
            await service.create_session("a")
        assert not {ended, silent} & {session.id for session in service.sessions("a")}
        for _ in range(2):
            with pytest.raises(Busy, match="4 sessions whose checkpoints are kept or that have not ended"):
                await service.create_session("a")
        await service.create_session("b")
        await service.delete_checkpoint("a", f"tinker://{kept}/weights/x")
        service.tidy()
        await service.create_session("a")
        assert isinstance(await ask(service, compute(used, 1)), PassResult)
    async with rig.open(records=4) as service:
        assert len(service.sessions("a")) == 4 and len(service.sessions("b")) == 1


async def test_the_record_has_a_bounded_number_of_models_and_their_numbers_stay_used(rig):
    async with rig.open(records=3) as service:
        session = await service.create_session("a")
        for number in range(5):
            model = await ask(service, create(session, number))
            assert isinstance(model, ModelReady)
            await ask(service, UnloadModel(model.model))
            while not service._training.gone(model.model):
                await asyncio.sleep(0)
        assert service.session("a", session).models == [f"{session}:train:{number}" for number in (2, 3, 4)]
    async with rig.open(records=3) as service:
        with pytest.raises(Gone, match="use the next number"):
            await service.submit("a", create(session, 1))
        assert isinstance(await ask(service, create(session, 5)), ModelReady)


async def test_the_record_has_a_bounded_number_of_samplers_and_the_last_used_stay(rig):
    async with rig.open(records=3) as service:
        session = await service.create_session("a")
        made = [await service.create_sampler("a", session, number) for number in range(3)]
        await ask(service, sample(made[0], 0))
        made.append(await service.create_sampler("a", session, 3))
        await ask(service, sample(made[0], 1))
        with pytest.raises(Unknown):
            await service.submit("a", sample(made[1], 0))
        assert service.session("a", session).samplers == [made[0], made[2], made[3]]
    async with rig.open(records=3) as service:
        assert service.session("a", session).samplers == [made[0], made[2], made[3]]


async def test_the_record_has_a_bounded_number_of_checkpoints(rig):
    async with rig.open(records=2) as service:
        model = await new_model(service)
        for seq in (1, 2):
            assert isinstance(await ask(service, save(model, seq)), Saved)
        failed = await ask(service, save(model, 3))
        assert isinstance(failed, Failed) and "2 checkpoints" in failed.message
        await service.delete_checkpoint("a", f"tinker://{model}/weights/1")
        assert isinstance(await ask(service, save(model, 4)), Saved)


def test_a_full_disk_is_named_when_the_record_cannot_be_opened(tmp_path, monkeypatch):
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL

    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(LedgerError, match="free space"):
        promises_module.Store(tmp_path / "service.db")


async def test_unloading_comes_after_what_was_accepted(rig):
    async with rig.open() as service:
        model = await new_model(service)
        before = await service.submit("a", step(model, 1))
        unloaded = await service.submit("a", UnloadModel(model))
        with pytest.raises(Gone, match="unloaded"):
            await service.submit("a", step(model, 2))
        assert isinstance(await result(service, before), Updated)
        assert await result(service, unloaded) == ModelReady(model)
        assert await service.submit("a", UnloadModel(model)) == unloaded


async def test_tenants_cannot_name_what_is_anothers(rig):
    async with rig.open() as service:
        model = await new_model(service)
        session = model.partition(":")[0]
        saved = await ask(service, snapshot(model, 1, 0))
        assert isinstance(saved, Saved)
        sampler = saved.sampler or ""
        promise = await service.submit("a", save(model, 2, "x"))
        await result(service, promise)
        path = f"tinker://{model}/weights/x"
        own = (await new_model(service, "b")).partition(":")[0]
        requests: list[Request] = [
            create(session, 5),
            compute(model, 3),
            step(model, 3),
            save(model, 3, "y"),
            snapshot(model, 3, 1),
            UnloadModel(model),
            LoadWeights(path, False, session=own, model_seq=1),
            sample(sampler, 0),
            sample(path=path),
        ]
        for request in requests:
            with pytest.raises(Unknown):
                await service.submit("b", request)
        for call in (
            lambda: service.outcome("b", promise, 0),
            lambda: service.completions("b", sampler, 0, 0, 0),
            lambda: service.join_sampler("b", sampler),
            lambda: service.create_sampler("b", own, 0, path),
            lambda: service.create_sampler("b", session, 9),
            lambda: service.finish_session("b", session, "success"),
            lambda: service.delete_checkpoint("b", path),
            lambda: service.set_ttl("b", path, None),
            lambda: service.publish("b", path, True),
            lambda: service.refuse("b", model, 3, "x"),
        ):
            with pytest.raises(Unknown):
                await call()
        for look in (
            lambda: service.cancel("b", promise),
            lambda: service.heartbeat("b", session),
            lambda: service.session("b", session),
            lambda: service.model("b", model),
            lambda: service.sampler("b", sampler),
            lambda: service.checkpoint("b", path),
            lambda: service.checkpoints("b", model),
        ):
            with pytest.raises(Unknown):
                look()
        assert service.checkpoints("b") == []
        # What never was is unknown in the same words.
        messages = set()
        for name in (model, model.replace("0", "1")):
            with pytest.raises(Unknown) as raised:
                service.model("b", name)
            messages.add(str(raised.value).replace(name, "X"))
        assert len(messages) == 1
        await service.publish("a", path, True)
        assert service.checkpoint("b", path).public
        assert isinstance(await ask(service, LoadWeights(path, False, session=own, model_seq=1), "b"), ModelReady)
        assert isinstance(await ask(service, sample(path=path), "b"), Samples)
        with pytest.raises(Unknown):
            await service.delete_checkpoint("b", path)


@pytest.mark.parametrize(
    ("limits", "request_of", "error", "message"),
    [
        ({"models": 1}, lambda s, m: create(s, 1), Busy, "models=1"),
        ({"request": 300}, lambda s, m: compute(m, 1, *range(60)), DataError, "request=300"),
        ({"tokens": 50}, lambda s, m: compute(m, 1, *range(60)), DataError, "tokens=50"),
        ({}, lambda s, m: compute(m, 1, *[1] * 65), DataError, "context of tiny is 64"),
        ({}, lambda s, m: compute(m, 1, -1), DataError, "token -1"),
        ({}, lambda s, m: compute(m, 1, 5, 100), DataError, "datum 0 has the token 100"),
        ({}, lambda s, m: compute(m, 1, 1.5), DataError, "the type float64"),
        ({}, lambda s, m: compute(m, 0), DataError, "numbers begin with 1"),
        ({}, lambda s, m: compute(m, 10**6), DataError, "too far ahead"),
        ({}, lambda s, m: step(m, 1, float("nan")), DataError, "learning_rate=nan"),
        ({}, lambda s, m: Compute(m, 1, Pass("ppo", {}, [], True)), DataError, "needs data"),
        ({}, lambda s, m: create(s, 1, rank=9), DataError, "rank 9"),
        ({}, lambda s, m: CreateModel(s, 1, "other", AdapterSpec(1, 1)), DataError, "'other' is not served"),
        ({}, lambda s, m: SaveForSampler(m, 1, "x", ttl_seconds=1), DataError, "cannot live for 1 s"),
        ({}, lambda s, m: Sample(Sampling(np.array([1]), samples=0)), DataError, "0 samples"),
        ({}, lambda s, m: Sample(Sampling(np.array([], int))), DataError, "at least one token"),
        ({}, lambda s, m: Sample(Sampling(np.array([1])), base_model="other"), DataError, "'other' is not served"),
        ({}, lambda s, m: CreateModel(s, 1, "tiny", AdapterSpec(1, 1), {"x": object()}), DataError, "recorded"),
    ],
)
async def test_refusals_name_the_limit_and_the_value(rig, limits, request_of, error, message):
    async with rig.open(**limits) as service:
        model = await new_model(service)
        with pytest.raises(error, match=message):
            await service.submit("a", request_of(model.partition(":")[0], model))
        assert service.status().tenants["a"].pending == 0


async def test_what_cannot_be_written_fails_nobody_else(rig):
    async with rig.open() as service:
        sampler = await new_sampler(service)
        good = asyncio.ensure_future(service.submit("a", sample(sampler, 0)))
        # A lone surrogate, as decoded from a header.
        for bad in (service.submit("\udc80", sample()), service.submit("a", sample(), key="\udc80")):
            with pytest.raises(DataError):
                await bad
        with pytest.raises(DataError):
            await service.create_session("a", name="\udc80")
        assert isinstance(await result(service, await good), Samples)
        assert service.status().tenants["a"].pending == 0
        assert service.status().failure == ""


async def test_a_tenant_waits_for_its_own_outcomes_only(rig):
    async with rig.open(pending=1, tokens=40) as service:
        rig.servers.pause = asyncio.Event()
        await service.create_session("a")
        promise = await service.submit("a", sample(tokens=30))
        with pytest.raises(Busy, match="pending=1"):
            await service.submit("a", sample(tokens=1))
        other = await service.submit("b", sample(tokens=30))
        rig.servers.pause.set()
        await result(service, promise)
        await result(service, other, "b")
        assert isinstance(await ask(service, sample(tokens=1)), Samples)


async def test_bytes_of_recorded_requests_are_limited_until_they_have_had_their_effect(rig):
    long = range(60)
    async with rig.open(recorded=2_300) as service:
        other, model = await new_model(service), await new_model(service)
        held = await service.submit("a", compute(other, 2, *long))
        await ask(service, compute(model, 1, *long))
        await ask(service, compute(model, 2, *long))
        for big in (compute(model, 3, *long, *long[:4]), sample(tokens=1, path="x" * 3_000)):
            with pytest.raises(Busy, match="2300; wait"):
                await service.submit("a", big)
        assert isinstance(await ask(service, compute(model, 3, 1, backward=False)), PassResult)
        assert isinstance(await ask(service, step(other, 1)), Updated)
        await result(service, held)
    async with rig.open(recorded=2_300) as service:
        # Waiting for outcomes changes nothing now, so its number is used up.
        with pytest.raises(DataError, match="take a step"):
            await service.submit("a", compute(model, 4, *long))
        for each, seq in ((model, 5), (other, 3)):
            assert isinstance(await ask(service, step(each, seq)), Updated)
        assert isinstance(await ask(service, compute(model, 6, *long)), PassResult)
        assert service._promises.account("b").request_bytes == 0


async def test_requests_beyond_their_share_of_memory_are_read_when_they_run(rig, monkeypatch):
    monkeypatch.setattr(promises_module, "MEMORY", 0)
    async with rig.open() as service:
        model = await new_model(service)
        later = [await service.submit("a", request) for request in (step(model, 3), compute(model, 2, 5))]
        assert all(promise.request is None for promise in service._promises)
        await ask(service, compute(model, 1, 4))
        assert [type(await result(service, promise)) for promise in later] == [Updated, PassResult]
        assert service._promises.account("a").request_bytes == 0


async def test_models_of_silent_sessions_do_not_fill_the_ranks(rig):
    async with rig.open(models=2) as service:
        models = []
        for number in range(3):
            models += [await new_model(service, seed=2 * number), await new_model(service, seed=2 * number + 1)]
            for model in models[-2:]:
                await ask(service, compute(model, 1))
            rig.now += service.limits.heartbeat_seconds + 1
            service.tidy()
        quiet = await new_model(service, "b")
        for seq in (2, 3):
            for model in models:
                rig.now += 1
                assert isinstance(await ask(service, compute(model, seq)), PassResult)
                assert len(set(models) & set(rig.trainer.models)) <= 2
        assert quiet in rig.trainer.models
        assert set(models) & set(rig.trainer.models) == set(models[-2:])
        # The gradients that left the ranks with them were made again.
        alone = await new_model(service, "c", seed=5)
        for seq in (1, 2, 3):
            await ask(service, compute(alone, seq), "c")
        assert str(await ask(service, step(models[-1], 4))) == str(await ask(service, step(alone, 4), "c"))


async def test_metadata_are_small(rig):
    large = {"x": "y" * 2**16}
    async with rig.open() as service:
        for refused in ({"tags": ["y" * 2**16]}, {"metadata": large}, {"name": "y" * 2**16}):
            with pytest.raises(DataError, match="65536 are allowed"):
                await service.create_session("a", **refused)
        assert service.sessions("a") == []
        model = await new_model(service)
        session = model.partition(":")[0]
        for request in (
            CreateModel(session, 1, "tiny", AdapterSpec(1, 1), large),
            SaveForSampler(model, 1, "x", metadata=large),
            LoadWeights("x", False, session=session, model_seq=1, metadata=large),
        ):
            with pytest.raises(DataError, match="65536 are allowed"):
                await service.submit("a", request)
        with pytest.raises(DataError, match="65536 are allowed"):
            await service.finish_session("a", session, "errored", "y" * 2**17)
        assert isinstance(await ask(service, step(model, 2)), Updated)


@pytest.mark.parametrize("kept", [0, 4096, 20_000])
async def test_without_its_record_nothing_of_a_service_is_removed(rig, kept):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, step(model, 1))
        await ask(service, save(model, 2, "x"))
        for seq in range(3, 40):
            await ask(service, compute(model, seq, *range(50)))
    record = rig.folder / "service.db"
    assert record.stat().st_size > 20_000
    with record.open("rb+") as file:
        file.truncate(kept)
    if not kept:
        record.unlink()
    for _ in range(2):
        with pytest.raises(LedgerError, match="service.db is damaged"):
            async with rig.open():
                pass
    assert list((rig.folder / "states").glob("*/1")) and list((rig.folder / "checkpoints").glob("*/2"))


async def test_a_full_share_of_the_disk_is_said(rig):
    async with rig.open(disk=30) as service:
        model = await new_model(service)
        await ask(service, step(model, 1))
        await ask(service, save(model, 2, "x"))
        failed = await ask(service, save(model, 3, "y"))
        assert isinstance(failed, Failed)
        assert "disk=30" in failed.message


async def test_status_counts_what_is_there(rig):
    async with rig.open() as service:
        model = await new_model(service)
        await ask(service, compute(model, 1, 4, 5, 6))
        await ask(service, step(model, 2))
        await ask(service, snapshot(model, 3, 0))
        await ask(service, save(model, 4, "x"))
        await service.submit("a", compute(model, 6))
        rig.now += 5
        status = service.status().tenants["a"]
        (found,) = status.models
        assert (found.id, found.steps, found.queued, found.waited) == (model, 1, 1, 5.0)
        assert (status.steps, status.tokens) == (1, 3)
        assert found.loss is not None
        assert found.on_ranks
        assert (status.sessions, status.snapshots, status.checkpoints, status.pending) == (1, 1, 1, 1)
        assert status.tokens_per_second > 0
        assert status.disk == sum(file.stat().st_size for file in rig.folder.rglob("state.json"))


def opened(folder: Path) -> Service:
    return Service(folder, FakeTrainer(), FakeServers(), SERVED)


async def crashed_copies(rig: Rig, *numbers: int) -> dict[int, Path]:
    """Copies of the folder as a crash would leave it after so many requests, some 1 MB each."""
    copies: dict[int, Path] = {}
    async with rig.open() as service:
        model = await new_model(service)
        work = Pass("cross_entropy", {}, batch(*range(50)) * 2000, True)
        for seq in range(1, max(numbers) + 1):
            # Large ones bring the log into the file, small ones stay in the log.
            large = step(model, seq) if seq % 4 == 0 else Compute(model, seq, work)
            await ask(service, compute(model, seq) if seq in numbers else large)
            if seq in numbers:
                copies[seq] = Path(shutil.copytree(rig.folder, rig.folder.with_name(f"copy {seq}")))
    return copies


def remove_log(copies: dict[int, Path]) -> None:
    (copies[6] / "service.db-wal").unlink()


def truncate_log(copies: dict[int, Path]) -> None:
    with (copies[6] / "service.db-wal").open("rb+") as file:
        file.truncate(5_000)


def restore_older_file(copies: dict[int, Path]) -> None:
    for name in ("service.db", "service.db-wal"):
        shutil.copy(copies[1] / name, copies[6] / name)


def restore_older_log(copies: dict[int, Path]) -> None:
    shutil.copy(copies[1] / "service.db-wal", copies[6] / "service.db-wal")


def take_anothers_file(copies: dict[int, Path]) -> None:
    remove_log(copies)
    (copies[6] / "service.db").unlink()
    opened(copies[6].with_name("another"))._promises._store._db.close()
    shutil.copy(copies[6].with_name("another") / "service.db", copies[6] / "service.db")


def remove_file(copies: dict[int, Path]) -> None:
    remove_log(copies)
    (copies[6] / "service.db").unlink()
    shutil.rmtree(copies[6] / "states")


def remove_mark(copies: dict[int, Path]) -> None:
    (copies[6] / "service.mark").unlink()


@pytest.mark.parametrize(
    "harm",
    [
        *(remove_log, truncate_log, restore_older_file, restore_older_log, take_anothers_file, remove_file),
        remove_mark,
    ],
)
async def test_a_record_that_lacks_what_was_accepted_is_refused(rig, harm):
    copies = await crashed_copies(rig, 1, 6)
    harm(copies)
    states = list((copies[6] / "states").glob("*/*"))
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"service\.mark"):
            opened(copies[6])
    assert list((copies[6] / "states").glob("*/*")) == states
    # Whoever knows what is missing can say so.
    (copies[6] / "service.mark").write_text("")
    opened(copies[6])


async def test_a_record_that_is_ahead_of_its_mark_is_whole(rig):
    copies = await crashed_copies(rig, 1, 6)
    # As after a power loss, which the mark need not survive.
    shutil.copy(copies[1] / "service.mark", copies[6] / "service.mark")
    service = opened(copies[6])
    assert [model.next for model in service.models("a")] == [7]
