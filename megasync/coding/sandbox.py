"""Runs a response's program in a sandbox, against an input or a test.

    run_program    a program reads its input and prints; the caller compares the output
    run_check      Python text, such as asserts, runs against a program: two sandboxes, joined by a socket

Invariants:

- The result never depends on anything that the program can reach. Expected outputs stay in this process. A check runs
  in a sandbox of its own, to which the program can send only plain data (`sandbox_link`), and its text is in no file,
  argument or environment.
- When a call returns or is cancelled, everything that the program started has been killed and its folder is gone;
  `LocalSandbox.stop` guarantees it. This cleanup never blocks the event loop, whatever the program left.

Every run has new sandboxes of this machine (`sandboxes.local`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megasync.errors import SandboxError
from megasync.sandboxes import Limits, Result, Spec
from megasync.sandboxes.guest.frames import PASSED
from megasync.sandboxes.local import OPTIONS, PYTHON, LocalSandbox, Ran, isolation, start_order

log = logging.getLogger(__name__)

_warned = False
# What a check runs, in the order of imports. The first is also what serves a check in the program's process.
_LINK = ("sandbox_link", "sandbox_stand_ins", "sandbox_check")
# Seconds that a program has to exit after its check has failed.
_PROGRAM_SECONDS = 1.0
# Programs get no more of this machine's environment than they need.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


@dataclass(frozen=True, slots=True)
class Check:
    """Python text that tests a program."""

    text: str
    # The names that it takes from the program.
    names: tuple[str, ...] = ()
    # Text that runs before it.
    prelude: str = ""
    # The names under which it imports the program.
    modules: tuple[str, ...] = ()


async def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Result:
    """Runs Python source to its end, or kills it after `limits.wall_seconds`. Raises SandboxError if it cannot start.

    Only the standard library is available. The working folder is empty, temporary and private to the program.
    """
    limits = limits or Limits()
    order = {"files": {"program.py": source}, "command": [PYTHON, *OPTIONS, "{root}/program.py"]}
    async with await _started(limits, order) as sandbox:
        return (await _ran(sandbox, order, stdin)).result


async def run_check(source: str, check: Check, limits: Limits | None = None) -> bool:
    """Whether a check passes with the names that a program defines, within `limits.wall_seconds`.

    Each runs in a sandbox of its own; see `sandbox_check` for what a check can do with a program. Raises SandboxError
    when one cannot be started.
    """
    limits = limits or Limits()
    code = _link_code()
    program_order = {
        "files": {"program.py": source, "link.py": next(iter(code.values()))},
        "command": [PYTHON, *OPTIONS, "{root}/link.py"],
    }
    check_order = {"check": asdict(check), "code": code}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with (
            await _started(limits, check_order, ours) as check_sandbox,
            await _started(limits, program_order, theirs) as program_sandbox,
        ):
            # Both sandboxes have the sockets. If this process kept one open, neither would notice the end of the other.
            ours.close()
            theirs.close()

            async def whole_program() -> None:
                await _ran(program_sandbox, program_order)
                # Processes that it left behind hold the link, and the check would wait for their answers.
                await program_sandbox.kill()

            program = asyncio.ensure_future(whole_program())
            try:
                ran = await _ran(check_sandbox, check_order)
                if not (passed := ran.result.code == PASSED):
                    log.debug("Check failed: %s", ran.result.stderr)
                    _warn_of_objects(ran.result.stderr)
                    # The program exits after its check. If it never started, SandboxError is raised, because the
                    # program is not at fault.
                    if ran.result.code is not None:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(_PROGRAM_SECONDS):
                                await asyncio.shield(program)
                return passed
            finally:
                program.cancel()
                await asyncio.wait({program})


async def _started(limits: Limits, order: dict[str, Any], link: socket.socket | None = None) -> LocalSandbox:
    """A sandbox that has not answered yet: its first order need not wait for that."""
    kind = await asyncio.to_thread(isolation)
    written = sum(map(len, order.get("files", {}).values())) * 4
    return LocalSandbox(Spec(limits=limits), start_order(Spec(limits=limits), kind, written), link)


async def _ran(sandbox: LocalSandbox, order: dict[str, Any], stdin: str = "") -> Ran:
    await sandbox.ready()
    ran = await sandbox.carry_out({"env": _ENVIRONMENT, **order}, stdin)
    if not ran.started:
        raise SandboxError(f"a sandbox could not be set up: {ran.result.stderr[-2000:]}")
    return ran


def _warn_of_objects(problem: str) -> None:
    """Says once that a test failed because it computes with an object of the program."""
    global _warned
    if "ProgramObject" in problem and not _warned:
        _warned = True
        log.warning(
            "A test failed because it needs data where the program returned an object, or does with an object what the "
            "code reward does not support. If right programs fail it too, change the test; see docs/code_reward.md. %s",
            problem.strip()[-300:],
        )


@cache
def _link_code() -> dict[str, str]:
    """The text of each module of the link, by its full name."""
    package = __name__.rpartition(".")[0]
    return {f"{package}.{name}": Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in _LINK}
