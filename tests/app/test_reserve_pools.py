"""A SIGTERM reaches the run while Ray connects, and after it, although Ray's core replaces the process's handler."""

import asyncio
import ctypes
import os
import signal
import threading
from contextlib import AsyncExitStack

import pytest
from waits import PATIENCE

from megasync.app import servers
from megasync.cluster.ray_cluster import RayCluster
from megasync.concurrency.event_loop import handle_signals
from megasync.config import Config
from megasync.device import resolve_device

IGNORED = ctypes.c_void_p(1)


class Connecting:
    """Replaces the handler behind Python's back, as Ray's core does, and goes on until the run is being stopped."""

    restore_signals = staticmethod(RayCluster.restore_signals)

    def __init__(self, *_: object) -> None:
        pass

    def connect(self) -> None:
        ctypes.CDLL(None).signal(signal.SIGTERM, IGNORED)
        assert STOPPED.wait(PATIENCE)

    def close(self) -> None:
        ctypes.CDLL(None).signal(signal.SIGTERM, IGNORED)


STOPPED = threading.Event()


@pytest.mark.parametrize("cancelled_before", [False, True])
async def test_a_signal_while_ray_connects_is_taken(monkeypatch, cancelled_before):
    """Also the second one, when the run that it stopped waits for Ray."""
    STOPPED.clear()
    monkeypatch.setattr(servers, "RayCluster", Connecting)

    async def reserve() -> None:
        async with AsyncExitStack() as stack:
            await servers.reserve_pools(stack, Config(), {}, resolve_device("cpu"))

    run = asyncio.create_task(reserve())
    if cancelled_before:
        await asyncio.sleep(0)
        run.cancel()
    later = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        (later if run.done() else STOPPED).set()
        run.cancel()

    with handle_signals([signal.SIGTERM], on_signal):
        async with asyncio.timeout(300):
            while not STOPPED.is_set():
                # One that comes before the handler is restored is lost here; Ray's passes it on.
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await run
        # As during an export, which follows Ray's end.
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(later.wait(), 300)
