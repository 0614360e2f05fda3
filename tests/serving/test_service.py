"""Starting, losing a port, dying and stopping, with a small HTTP server instead of a big one."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from waits import PATIENCE

from megasync.errors import ServerError
from megasync.serving.control import ServerControl
from megasync.serving.process import Service

pytestmark = pytest.mark.processes

SERVER = """
import http.server, sys
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


class Small(Service):
    name = "small server"
    code = SERVER
    ports: tuple[int, ...] = ()

    def prepare(self) -> None:
        self.ports = (*self.ports, self.port)

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code, str(self.port)]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    async def ready(self) -> bool:
        control = ServerControl(self.url)
        try:
            await control.get("/", timeout=1.0)
            return True
        except ServerError:
            return False
        finally:
            await control.close()


@pytest.fixture
async def small(tmp_path):
    service = Small("127.0.0.1", 0, tmp_path / "log")
    yield service
    await service.stop(1.0)


async def test_it_starts_on_a_free_port_and_stops(small):
    url = await small.start(PATIENCE)
    assert url == f"http://127.0.0.1:{small.port}"
    assert small.alive()
    with pytest.raises(ServerError, match="running already"):
        await small.start(PATIENCE)
    await small.stop()
    assert not small.alive()
    # And once more, with a log that is appended to.
    await small.start(PATIENCE)
    assert small.alive()


async def test_a_port_lost_to_somebody_else_is_tried_again(small):
    # The first attempt dies as if the port had been taken between the choice and the use.
    small.code = f"""
import os
if not os.path.exists({str(small.log_path)!r} + ".once"):
    open({str(small.log_path)!r} + ".once", "w").close()
    raise OSError(98, "Address already in use")
{SERVER}
"""
    await small.start(PATIENCE)
    assert len(small.ports) == 2


async def test_a_process_that_lives_on_without_its_port_is_started_again(small):
    small.code = f"""
import os, sys, time
if not os.path.exists({str(small.log_path)!r} + ".once"):
    open({str(small.log_path)!r} + ".once", "w").close()
    address = f"('127.0.0.1', {{sys.argv[1]}})"
    print(f"[Errno 98] error while attempting to bind on address {{address}}: address already in use", flush=True)
    time.sleep(600)
{SERVER}
"""
    await small.start(PATIENCE)
    assert len(small.ports) == 2


async def test_a_port_of_the_users_own_choice_is_not_replaced(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = Small("127.0.0.1", port, tmp_path / "log")
        with pytest.raises(ServerError, match=f"{port}: the port is in use"):
            await service.start(PATIENCE)
        assert service.ports == ()


async def test_death_at_start_shows_the_last_lines(small):
    small.code = "import sys; print('loading'); sys.exit('weights are missing')"
    with pytest.raises(
        ServerError, match=r"ended with status 1 while starting[\s\S]*loading[\s\S]*weights are missing"
    ):
        await small.start(PATIENCE)


async def test_a_start_that_takes_too_long_is_ended(small):
    small.code = "import time; print('still loading', flush=True); time.sleep(600)"
    with pytest.raises(ServerError, match=r"was not ready .* within 3 s \(timeouts.server_start\)[\s\S]*still loading"):
        await small.start(3)
    assert not small.alive()
