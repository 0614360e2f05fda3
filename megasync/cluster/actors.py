"""Handles of the actors of one role: start them in their pool, call them, end them.

Every call has a deadline and every failure says which member failed and why; nobody else touches Ray's futures. A member
that died or does not answer is a `ProcessLost`, whatever its peers said about it; anything else came out of the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from megasync.cluster.pools import Pools
from megasync.cluster.roles import ROLES
from megasync.errors import MegasyncError, ProcessLost, TrainingError

# The peers of a member that died may fail, in a collective with it, before Ray knows of the death.
OBITUARY_SECONDS = 5.0


class Actors:
    """The actors of one role, in slot order."""

    def __init__(self, role: str, handles: Sequence[Any]) -> None:
        self.role = role
        self.handles = list(handles)

    @classmethod
    def create(
        cls,
        role: str,
        arguments: Sequence[tuple],
        *,
        pools: Pools | None = None,
        pool: str | None = None,
        guest: bool = False,
        beside: bool = False,
        first_slot: int = 0,
        environment: dict[str, str] | None = None,
    ) -> Actors:
        """One actor per entry of `arguments`, placed in the role's pool (or `pool`) from `first_slot` on.

        A guest takes no device; nor does one that is put beside the process which has the slot.
        """
        spec = ROLES[role]
        pool = pool or spec.pool
        remote = ray.remote(spec.actor)
        handles = []
        for slot, args in enumerate(arguments, first_slot):
            if pool is None or pools is None:
                options: dict = {"num_cpus": 0}
            elif guest:
                options = pools.guest_options(pool)
            else:
                options = pools.neighbour_options(pool, slot) if beside else pools.options(pool, slot)
            if environment:
                options["runtime_env"] = {"env_vars": environment}
            handles.append(remote.options(**options, max_restarts=0).remote(*args))
        return cls(role, handles)

    async def call(self, method: str, *args: Any, timeout: float | None) -> list[Any]:
        """Calls `method(*args)` on every member; results in slot order. Ends with the first failure."""
        shared = [ray.put(a) if isinstance(a, (list, dict)) else a for a in args]
        return await self._gather(method, [getattr(h, method).remote(*shared) for h in self.handles], timeout)

    async def call_one(self, slot: int, method: str, *args: Any, timeout: float | None) -> Any:
        ref = getattr(self.handles[slot], method).remote(*args)
        return (await self._gather(method, [ref], timeout, first=slot))[0]

    async def _gather(self, method: str, refs: list, timeout: float | None, first: int = 0) -> list[Any]:
        waits = [asyncio.ensure_future(self._result(slot, method, ref)) for slot, ref in enumerate(refs, first)]
        try:
            done, late = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            failure = next((wait.exception() for wait in done if wait.exception()), None)
            if failure is not None:
                raise await _death(failure, late) or failure
            if late:
                slots = [slot for slot, wait in enumerate(waits, first) if wait in late]
                raise ProcessLost(
                    f"{self.role} {slots} did not finish {method}() within {timeout:.0f} s; raise the matching "
                    f"timeouts.* value if the work really takes longer"
                )
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _result(self, slot: int, method: str, ref: Any) -> Any:
        try:
            return await asyncio.wrap_future(ref.future())
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, MegasyncError):
                raise cause from None
            raise TrainingError(f"{self.role} {slot} failed in {method}(): {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            raise ProcessLost(f"{self.role} {slot} died during {method}(): {error}") from error

    def kill(self) -> None:
        """Ends the actor processes at once; for after `stop`, or when a member no longer answers."""
        for handle in self.handles:
            ray.kill(handle, no_restart=True)
        self.handles.clear()


async def _death(failure: BaseException, others: set[asyncio.Future]) -> ProcessLost | None:
    """The death of another member, when that may be what an unexpected failure comes from; None when all live."""
    if not isinstance(failure.__cause__, RayTaskError):
        return None
    deadline = time.monotonic() + OBITUARY_SECONDS
    while others:
        left = max(0.0, deadline - time.monotonic())
        ended, others = await asyncio.wait(others, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for death in (wait.exception() for wait in ended):
            if isinstance(death, ProcessLost):
                return death
        if not ended:
            return None
    return None
