"""What a publish concludes from the failures of a server, above all of one with several engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.errors import EngineErrors, HttpStatusError, ServerError
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl
from megasync.serving.plugin_protocol import REFUSED
from megasync.sync.attempt import Attempt, ServerProgress, ServerUpdate, each_engine, untouched
from megasync.sync.disk.sync import NOT_LOADED, DiskServer, SealedVersion
from megasync.sync.shard.server import ShardServer

URL = "http://server"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
SEALED = SealedVersion(3, Path("/sync/v3"), {})


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


REFUSAL = status("refused")
FAILURE = status("out of memory")


@pytest.mark.parametrize(
    ("errors", "nothing_written"),
    [
        ([REFUSAL], True),
        ([FAILURE], False),
        ([REFUSAL, REFUSAL], True),
        ([None, REFUSAL], False),
        ([REFUSAL, None], False),
        ([REFUSAL, FAILURE], False),
    ],
    ids=["refused", "failed", "both refused", "second refused", "first refused", "second failed"],
)
def test_a_load_has_written_nothing_if_each_engine_says_so(errors, nothing_written):
    error = errors[0] if len(errors) == 1 else EngineErrors("some engines", errors)
    assert each_engine(error) == tuple(errors)
    assert untouched(error, "refused") is nothing_written


async def loaded(transport: str, control: ServerControl, nodes: int = 1) -> tuple[ServerProgress, Path | None]:
    """The progress of a load, and the folder that is still being read."""
    current = attempt()
    if transport == "p2p":
        server, request = ShardServer(control, "abort", 5.0), {}
    else:
        server, request = DiskServer(control, "abort", 5.0), SEALED
        server.nodes = nodes
    try:
        await server.load(request, current)
    except EngineErrors:
        assert not current.progress[URL].moved
    return current.progress[URL], getattr(server, "reading", None)


REFUSALS = {"p2p": status(f"{REFUSED}: no version"), "disk": status(f"{NOT_LOADED}: no folder")}


@pytest.mark.parametrize("transport", ["p2p", "disk"])
@pytest.mark.parametrize(
    ("first", "second", "in_doubt"),
    [("refused", "refused", False), (None, "refused", True), ("refused", None, True), ("refused", "late", True)],
)
async def test_a_load_is_in_doubt_unless_all_engines_refused_it(transport, first, second, in_doubt):
    outcomes = {None: None, "refused": REFUSALS[transport], "late": late()}
    progress, reading = await loaded(transport, of_engines(outcomes[first], outcomes[second]))
    assert (progress.in_doubt, progress.mixed) == (in_doubt, in_doubt)
    # One that has not answered may still be reading.
    assert reading == (SEALED.path if (transport, second) == ("disk", "late") else None)


@pytest.mark.parametrize("other", [None, FAILURE], ids=["loaded", "failed"])
@pytest.mark.parametrize("swap", [False, True])
async def test_a_folder_is_still_read_if_one_engine_has_not_answered(other, swap):
    _, reading = await loaded("disk", of_engines(other, late()) if swap else of_engines(late(), other))
    assert reading == SEALED.path


async def test_a_load_on_several_hosts_is_in_doubt_whatever_the_first_rank_answers():
    progress, _ = await loaded("disk", of_engines(status(NOT_LOADED), status(NOT_LOADED)), nodes=2)
    assert progress.in_doubt


async def test_a_commit_of_all_engines_has_moved_the_server_and_a_checksum_decides_about_a_folder():
    progress, _ = await loaded("p2p", of_engines(None, None))
    assert (progress.in_doubt, progress.moved) == (False, True)
    progress, reading = await loaded("disk", of_engines(None, None))
    assert progress.in_doubt and reading is None


OPEN = status("an update is open")


@pytest.mark.parametrize(
    ("errors", "paths"),
    [
        ([None], [BEGIN]),
        # One that an earlier driver left open is closed first, in all engines.
        ([OPEN], [BEGIN, END, BEGIN]),
        ([None, OPEN], [BEGIN, END, BEGIN]),
        ([OPEN, OPEN], [BEGIN, END, BEGIN]),
        # An engine that does not answer has refused nothing, and may have opened one all the same.
        ([late()], None),
        ([None, late()], None),
        ([OPEN, late()], None),
        ([late(), late()], None),
    ],
)
async def test_an_update_that_is_open_is_closed_first_unless_an_engine_does_not_answer(errors, paths):
    control, current = FakeEngine(URL, *errors) if len(errors) == 1 else of_engines(*errors), attempt()
    begin = ServerUpdate(control, "abort", 5.0).begin(current)
    if paths is None:
        with pytest.raises(ServerError, match="no answer within 5 s"):
            await begin
    else:
        await begin
    engines = [control] if len(errors) == 1 else control._engines
    assert [engine.paths for engine in engines] == [paths or [BEGIN]] * len(engines)
    assert current.progress[URL].update_open
