"""Ray actors: groups with one role, and killing actors that no longer respond.

Every call has a deadline and every failure names the actor and the cause; no other module touches Ray's futures. An
actor that died or does not answer is a `ProcessLost`, whatever its peers reported; any other error came out of the
call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import MegasyncError, ProcessLost, TrainingError

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

# When an actor dies, its peers' collectives may fail before Ray reports the death. Seconds to wait for that report.
DEATH_REPORT_SECONDS = 5.0
# Added to a start's own deadline, so that the service's error, which is more specific, comes first. Also the deadline
# of short calls.
ANSWER_SECONDS = 30.0
# Seconds for a killed process to exit, on a busy machine.
EXIT_SECONDS = 10.0


class ActorGroup:
    """The actors of one role in slot order. Errors name the role and, unless it has a single actor, the slot.

    An actor is a plain class, made remote here. Calls name a method of that class, not its name, so that a type checker
    sees the method and its arguments.
    """

    def __init__(self, role: str, handles: Sequence[Any]) -> None:
        self.role = role
        self.handles = list(handles)
        self._single = len(self.handles) == 1

    @classmethod
    def create(
        cls, role: str, actor: type, arguments: Sequence[tuple[Any, ...]], options: Sequence[dict[str, Any]]
    ) -> ActorGroup:
        """Starts one actor per entry of `arguments`, with Ray's `options` for its slot (`Pools.options`)."""
        remote = ray.remote(actor)
        handles = [
            remote.options(**each, max_restarts=0).remote(*args) for each, args in zip(options, arguments, strict=True)
        ]
        return cls(role, handles)

    async def on_all(
        self, timeout: float | None, method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls a method on every actor; results in slot order. Raises the first failure."""
        name = method.__name__
        shared = [ray.put(arg) if isinstance(arg, (list, dict)) else arg for arg in args]
        refs = [getattr(handle, name).remote(*shared, **kwargs) for handle in self.handles]
        return await self._gather(name, refs, timeout)

    async def on_one(
        self,
        slot: int,
        timeout: float | None,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R] | R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Calls a method on one actor."""
        name = method.__name__
        ref = getattr(self.handles[slot], name).remote(*args, **kwargs)
        return (await self._gather(name, [ref], timeout, first=slot))[0]

    async def _gather(self, method: str, refs: list[Any], timeout: float | None, first: int = 0) -> list[Any]:
        calls = [asyncio.ensure_future(self._result(slot, method, ref)) for slot, ref in enumerate(refs, first)]
        try:
            done, late = await asyncio.wait(calls, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            failure = next((error for call in done if (error := call.exception())), None)
            if failure is not None:
                raise await _find_death(failure, late) or failure
            if late:
                slots = [slot for slot, call in enumerate(calls, first) if call in late]
                loss = ProcessLost(
                    f"{self._named(slots)} did not finish {method}() within {timeout:.0f} s; raise the matching "
                    f"timeouts.* value if the work really takes longer"
                )
                loss.slots, loss.silent = tuple(slots), True
                raise loss
            return [call.result() for call in calls]
        finally:
            await cancel_and_wait(*calls)

    async def _result(self, slot: int, method: str, ref: Any) -> Any:
        try:
            return await asyncio.wrap_future(ref.future())
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, MegasyncError):
                raise cause from None
            raise TrainingError(f"{self._named(slot)} failed in {method}(): {type(cause).__name__}: {cause}") from error
        except RayError as error:
            # The actor died, or its node is gone.
            loss = ProcessLost(f"{self._named(slot)} died during {method}(): {error}")
            loss.slots = (slot,)
            raise loss from error

    def _named(self, slots: int | list[int]) -> str:
        return self.role if self._single else f"{self.role} {slots}"

    def kill(self) -> None:
        """Kills the actors immediately; use it after `stop`, or when an actor no longer answers."""
        for handle in self.handles:
            ray.kill(handle, no_restart=True)
        self.handles.clear()


async def _find_death(failure: BaseException, others: set[asyncio.Task[Any]]) -> ProcessLost | None:
    """The death of another actor, which an unexpected failure may come from; None when all are alive."""
    if not isinstance(failure.__cause__, RayTaskError):
        return None
    deadline = time.monotonic() + DEATH_REPORT_SECONDS
    while others:
        left = max(0.0, deadline - time.monotonic())
        ended, others = await asyncio.wait(others, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for death in (call.exception() for call in ended):
            if isinstance(death, ProcessLost):
                return death
        if not ended:
            return None
    return None


def kill_process(pid: int, title: str) -> None:
    """Kills a process of this node if `title` is in its command line. Raises psutil.TimeoutExpired if it survives."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        # Process ids are reused: Ray names an actor's process after its class.
        if title in " ".join(process.cmdline()):
            process.kill()
            process.wait(EXIT_SECONDS)
