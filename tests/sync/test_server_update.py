"""What a publish concludes from the failures of a server, above all of one with several engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.errors import EngineErrors, HttpStatusError, ServerError
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl
from megasync.serving.engine_protocol import REFUSED
from megasync.sync.attempt import Attempt, ServerProgress
from megasync.sync.disk.sync import NOT_LOADED, DiskServer, SealedVersion
from megasync.sync.server_update import ServerUpdate, each_engine, untouched
from megasync.sync.shard.engine import ServingEngine

URL = "http://server"
BEGIN, END = "/begin_weight_update", "/end_weight_update"


def status(text: str) -> HttpStatusError:
    return HttpStatusError(f"status 400: {text}", 400)


def late() -> ServerError:
    error = ServerError("no answer within 5 s")
    error.__cause__ = TimeoutError()
    return error


class FakeEngine(ServerControl):
    """Fails with `errors`, one a call; None and all calls after them succeed."""

    def __init__(self, url: str, *errors: Exception | None) -> None:
        super().__init__(url)
        self.paths: list[str] = []
        self._errors = list(errors)

    async def _request(self, method, path, body, timeout):
        self.paths.append(path)
        if self._errors and (error := self._errors.pop(0)) is not None:
            raise error
        return {"success": True}


def of_engines(first: Exception | None, second: Exception | None) -> DisaggregatedControl:
    """The control of a server of two engines with the outcomes of their next call."""
    return DisaggregatedControl(URL, [FakeEngine("http://prefill", first)], [FakeEngine("http://decode", second)])


def attempt() -> Attempt:
    return Attempt(3, {URL: ServerProgress()})


# What a load has written


def test_an_error_of_a_server_is_that_of_its_only_engine():
    error = status("x")
    assert each_engine(error) == (error,)
    errors = (None, error)
    assert each_engine(EngineErrors("1 of 2 engines", errors)) == errors


@pytest.mark.parametrize(
    ("error", "nothing_written"),
    [
        (status("refused: no plan"), True),
        (status("out of memory"), False),
        (EngineErrors("refused; refused", [status("refused"), status("refused")]), True),
        (EngineErrors("refused", [None, status("refused")]), False),
        (EngineErrors("refused", [status("refused"), None]), False),
        (EngineErrors("refused; out of memory", [status("refused"), status("out of memory")]), False),
    ],
    ids=["refused", "failed", "both refused", "second refused", "first refused", "second failed"],
)
def test_a_load_has_written_nothing_if_each_engine_says_so(error, nothing_written):
    assert untouched(error, "refused") is nothing_written


OUTCOMES = {
    "both refused": (True, True, False),
    "second refused": (False, True, True),
    "first refused": (True, False, True),
}


@pytest.mark.parametrize(("first", "second", "in_doubt"), OUTCOMES.values(), ids=OUTCOMES)
async def test_a_commit_is_in_doubt_unless_all_engines_refused_it(first, second, in_doubt):
    control = of_engines(*(status(f"{REFUSED}: no version") if refuses else None for refuses in (first, second)))
    engine, current = ServingEngine(control, "abort", 5.0), attempt()
    with pytest.raises(EngineErrors):
        await engine.load({}, current)
    progress = current.progress[URL]
    assert (progress.in_doubt, progress.mixed, progress.moved) == (in_doubt, in_doubt, False)


async def test_a_commit_is_in_doubt_if_one_engine_refused_it_and_another_did_not_answer():
    engine, current = ServingEngine(of_engines(status(REFUSED), late()), "abort", 5.0), attempt()
    with pytest.raises(EngineErrors):
        await engine.load({}, current)
    assert current.progress[URL].in_doubt


async def test_a_commit_of_all_engines_has_moved_the_server():
    engine, current = ServingEngine(of_engines(None, None), "abort", 5.0), attempt()
    await engine.load({}, current)
    progress = current.progress[URL]
    assert (progress.in_doubt, progress.moved) == (False, True)


def disk_server(control: ServerControl, nodes: int = 1) -> DiskServer:
    server = DiskServer(control, "abort", 5.0)
    server.nodes = nodes
    return server


SEALED = SealedVersion(3, Path("/sync/v3"), {})


@pytest.mark.parametrize(("first", "second", "in_doubt"), OUTCOMES.values(), ids=OUTCOMES)
async def test_a_load_from_disk_is_in_doubt_unless_no_engine_opened_the_folder(first, second, in_doubt):
    control = of_engines(*(status(f"{NOT_LOADED}: no folder") if refuses else None for refuses in (first, second)))
    server, current = disk_server(control), attempt()
    with pytest.raises(EngineErrors):
        await server.load(SEALED, current)
    assert current.progress[URL].in_doubt is in_doubt
    assert server.reading is None


async def test_a_load_on_several_hosts_is_in_doubt_whatever_the_first_rank_answers():
    server, current = disk_server(of_engines(status(NOT_LOADED), status(NOT_LOADED)), nodes=2), attempt()
    with pytest.raises(EngineErrors):
        await server.load(SEALED, current)
    assert current.progress[URL].in_doubt


@pytest.mark.parametrize("other", [None, status("out of memory")], ids=["loaded", "failed"])
@pytest.mark.parametrize("swap", [False, True])
async def test_a_folder_is_still_read_if_one_engine_has_not_answered(other, swap):
    server = disk_server(of_engines(other, late()) if swap else of_engines(late(), other))
    with pytest.raises(EngineErrors):
        await server.load(SEALED, attempt())
    assert server.reading == SEALED.path


async def test_a_folder_that_all_engines_have_loaded_is_not_read_any_more():
    server, current = disk_server(of_engines(None, None)), attempt()
    await server.load(SEALED, current)
    # The checksum of the weights decides.
    assert current.progress[URL].in_doubt and server.reading is None


# An update that an earlier driver left open


async def test_an_update_opens_with_one_call():
    server, current = FakeEngine(URL), attempt()
    await ServerUpdate(server, "abort", 5.0).begin(current)
    assert server.paths == [BEGIN] and current.progress[URL].update_open


async def test_an_update_that_is_open_is_closed_first():
    server, current = FakeEngine(URL, status("an update is open")), attempt()
    await ServerUpdate(server, "abort", 5.0).begin(current)
    assert server.paths == [BEGIN, END, BEGIN] and current.progress[URL].update_open


async def test_an_update_is_not_closed_for_a_server_that_did_not_answer():
    server = FakeEngine(URL, late())
    with pytest.raises(ServerError, match="no answer within 5 s"):
        await ServerUpdate(server, "abort", 5.0).begin(attempt())
    assert server.paths == [BEGIN]


@pytest.mark.parametrize("first", [None, status("an update is open")], ids=["opened", "refused"])
async def test_an_update_that_is_open_in_an_engine_is_closed_in_all(first):
    control = of_engines(first, status("an update is open"))
    await ServerUpdate(control, "abort", 5.0).begin(attempt())
    assert [engine.paths for engine in control._engines] == [[BEGIN, END, BEGIN]] * 2


@pytest.mark.parametrize("first", [None, status("an update is open"), late()], ids=["opened", "refused", "silent"])
async def test_an_engine_that_does_not_answer_has_refused_nothing(first):
    control, current = of_engines(first, late()), attempt()
    with pytest.raises(EngineErrors, match="no answer within 5 s"):
        await ServerUpdate(control, "abort", 5.0).begin(current)
    assert [engine.paths for engine in control._engines] == [[BEGIN]] * 2
    # It may have opened one all the same.
    assert current.progress[URL].update_open
