"""Rehearses the ranks of a configuration in child processes.

Two children at most work at once, each on one rank after another. Every wait for a child has a deadline. A child that
exceeds it or dies is replaced, and its rank is reported as different. No child is left when `rehearse` returns, also
after an error or Ctrl-C; if this process is killed, a child ends when it has finished its rank.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from megasync.concurrency.tasks import gather_or_cancel, within
from megasync.config import CONFIG_FILE, save_config
from megasync.config.schema import Config
from megasync.errors import ConfigError, TrainingError
from megasync.lab.rehearsal.report import RankReport, Rehearsal
from megasync.layout.layout import Layout
from megasync.layout.model_files import find_hf_config
from megasync.serving.server import stand_ins_path

# Versions of megatron-core that the trainer supports.
MEGATRONS = ("0.16.1", "0.19.2")
PROCESSES = 2
# Ranks that a second process is worth: importing Megatron takes as long as some of them.
RANKS_EACH = 6
# Ranks after which a child is replaced. Each leaves some megabytes behind.
RANKS_A_CHILD = 100
# Importing Megatron takes 5 s and a rank 1 s; a busy machine takes many times that.
START_SECONDS = RANK_SECONDS = 300.0
# Bytes at the end of a dead child's messages that are quoted.
QUOTED = 500
# A report of a rank is one line; with thousands of differences it is long.
LINE_BYTES = 2**26


def installed_megatron() -> str:
    """The version of megatron-core in this environment."""
    return version("megatron-core")


def sampled_ranks(layout: Layout) -> list[int]:
    """A rank of every pipeline stage and expert coordinate, on varying tensor and data coordinates, and the last rank.

    Ranks with the same stage and expert coordinate hold the same parameters, and differ only in what part of them.
    """
    topology = layout.topology
    chosen = {topology.world - 1}
    for stage in range(topology.pipeline):
        for expert in range(topology.expert):
            ranks = [rank for rank in topology.stage_ranks(stage) if topology.expert_coords(rank).ep == expert]
            # The first and the last stage begin with the first rank.
            chosen.add(ranks[(7 * expert + 5 * stage) % len(ranks)])
    return sorted(chosen)


def rehearse(
    config: Config,
    ranks: Sequence[int],
    megatron: str,
    progress: Callable[[RankReport], None] = lambda report: None,
    rank_seconds: float = RANK_SECONDS,
) -> Rehearsal:
    """Rehearses these ranks of a checked configuration on a version of megatron-core.

    ``progress`` is called with each rank's report as soon as it is there, in any order. Raises ConfigError if a package
    is missing, with the command that installs it, and TrainingError if the children cannot start.
    """
    return asyncio.run(_Children(config, ranks, megatron, progress, rank_seconds).run())


class _Children:
    """The children of one rehearsal, and the ranks that are still to be rehearsed."""

    def __init__(
        self,
        config: Config,
        ranks: Sequence[int],
        megatron: str,
        progress: Callable[[RankReport], None],
        rank_seconds: float,
    ) -> None:
        # Children run in another folder.
        model = replace(config.model, config=str(find_hf_config(config.model, planning=True).absolute()))
        # Ranks exchange the same tokens with all-to-all, whose memory is what the plan counts.
        self._config = replace(config, model=model, trainer=replace(config.trainer, moe_deepep=False))
        self._open = deque(ranks)
        self._megatron = megatron
        self._progress = progress
        self._rank_seconds = rank_seconds
        self._reports: dict[int, RankReport] = {}

    async def run(self) -> Rehearsal:
        with tempfile.TemporaryDirectory(prefix="megasync-rehearsal-") as name:
            folder = Path(name)
            save_config(self._config, folder / CONFIG_FILE)
            processes = min(PROCESSES, -(-len(self._open) // RANKS_EACH))
            await gather_or_cancel(*(self._work(folder, number) for number in range(processes)))
        return Rehearsal(self._megatron, tuple(self._reports[rank] for rank in sorted(self._reports)))

    async def _work(self, folder: Path, number: int) -> None:
        """Starts a child, and another one whenever it has ended, until no rank is left."""
        while self._open:
            with (folder / f"child-{number}.log").open("wb+") as log:
                child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "megasync.lab.rehearsal.child", str(folder / CONFIG_FILE), self._megatron),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=_environment(),
                    limit=LINE_BYTES,
                    # Ctrl-C is for this process.
                    start_new_session=True,
                )
                try:
                    await self._converse(child, log.name)
                finally:
                    with suppress(ProcessLookupError):
                        child.kill()
                    await child.wait()

    async def _converse(self, child: asyncio.subprocess.Process, log: str) -> None:
        """Has ranks rehearsed until none is left or the child is to be replaced. Its failure is a difference."""
        started = await _answer(child, START_SECONDS)
        if isinstance(started, str):
            raise TrainingError(f"a process that rehearses ranks {started}:{_tail(log)}")
        if "error" in started:
            raise ConfigError(started["error"])
        assert child.stdin is not None
        for _ in range(RANKS_A_CHILD):
            if not self._open:
                return
            rank = self._open.popleft()
            with suppress(ConnectionError):
                child.stdin.write(f"{rank}\n".encode())
                await child.stdin.drain()
            answer = await _answer(child, self._rank_seconds)
            failed = isinstance(answer, str)
            if isinstance(answer, str):
                text = f"its process {answer}:{_tail(log)}"
                report = RankReport(rank, 0, {}, {}, self._rank_seconds, (text,))
            else:
                report = msgspec.convert(answer, RankReport)
            self._reports[rank] = report
            self._progress(report)
            if failed:
                return


async def _answer(child: asyncio.subprocess.Process, seconds: float) -> dict[str, Any] | str:
    """The child's next answer, or in words why there is none."""
    assert child.stdout is not None
    try:
        line = await within(child.stdout.readline(), seconds)
    except TimeoutError:
        return f"did not answer within {seconds:g} s"
    if line:
        return json.loads(line)
    return f"ended with status {await child.wait()}"


def _tail(log: str) -> str:
    """The end of the child's messages, after a line break."""
    text = Path(log).read_text(encoding="utf-8", errors="replace")[-QUOTED:].strip()
    return f"\n{text}" if text else " it left no message"


def _environment() -> dict[str, str]:
    """That of a rank on a CPU: one thread, no compiler, and triton's stand-in for megatron-core 0.19."""
    path = [part for part in (os.environ.get("PYTHONPATH"), stand_ins_path()) if part]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
    }
