"""Trainer ranks in processes of their own, and what they train on. A conftest.py imports the fixtures."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import MODELS, MORE_MODELS, write_model

WORKER = Path(__file__).parents[1] / "trainer" / "worker.py"
# Metrics of a step that depend on the clock.
TIMED = {"train/seconds", "train/tokens_per_second_per_device", "train/tflops_per_device"}
# One of each way to spread a step over two ranks; data-parallel ranks have several microbatches.
TWO_RANKS = {
    "dp2": {"data_parallel": 2, "tokens_per_microbatch": 40},
    "pp2": {"pipeline_parallel": 2, "first_stage_layers": 1},
    "tp2": {"tensor_parallel": 2},
    "cp2": {"context_parallel": 2},
}
# Seconds for one request; many times what any needs, even on a crowded machine.
TIMEOUT = 240


def assert_same_metrics(left: dict, right: dict, **tolerance: float) -> None:
    """Two steps have the same metrics, but for the clock."""
    assert left.keys() == right.keys()
    for name in left.keys() - TIMED:
        assert left[name] == pytest.approx(right[name], **tolerance), name


class Ranks:
    """``world`` worker processes in one process group, which take one request after another."""

    def __init__(self, world: int, folder: Path, flavour: str) -> None:
        self._logs = [folder / "log.txt", *(folder / f"log-{rank}.txt" for rank in range(world))]
        pairs = [socket.socketpair() for _ in range(world)]
        theirs = [pair[1].fileno() for pair in pairs]
        with self._logs[0].open("w") as log:
            self._parent = subprocess.Popen(
                [sys.executable, str(WORKER), flavour, str(folder), json.dumps(theirs)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        for _, end in pairs:
            end.close()
        self._links = [own for own, _ in pairs]
        self._answers = [own.makefile() for own in self._links]

    def run(self, case: str, file: str, folder: Path, arguments: dict) -> list:
        (folder / "request.json").write_text(json.dumps({"case": case, "file": file, "arguments": arguments}))
        watchdog = threading.Timer(TIMEOUT, self._parent.kill)
        watchdog.start()
        try:
            for link in self._links:
                link.sendall(f"{folder}\n".encode())
            for rank, answers in enumerate(self._answers):
                assert answers.readline() == "done\n", f"{case}, rank {rank}:\n{self._log(rank)}"
        except OSError as error:
            raise AssertionError(f"{case}: {error}\n{self._log(0)}") from error
        finally:
            watchdog.cancel()
        return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(len(self._links))]

    def _log(self, rank: int) -> str:
        """What the ranks' parent and the rank have written last."""
        return "".join(log.read_text()[-6000:] for log in (self._logs[0], self._logs[rank + 1]) if log.exists())

    def close(self) -> None:
        """Kills the parent, and with it the ranks."""
        self._parent.kill()
        self._parent.wait()
        for end in (*self._answers, *self._links):
            end.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    more_experts = {"qwen3_moe_top4": {**MORE_MODELS["qwen3_moe"], "num_experts_per_tok": 4}}
    configs = {**MODELS, **MORE_MODELS, **more_experts}
    return {name: str(write_model(root / name, config, seed)) for seed, (name, config) in enumerate(configs.items())}


@pytest.fixture(scope="session")
def rows() -> list[dict]:
    """Prompts and responses: three groups with a common prompt, one lone response, lengths from 1 to 40."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 131, (count,), generator=generator).tolist()

    found = []
    for prompt_length, lengths in ((5, (1, 2, 3)), (38, (4, 40)), (12, (6, 6, 9, 1)), (3, (17,))):
        prompt = tokens(prompt_length)
        found += [{"prompt": prompt, "response": tokens(length)} for length in lengths]
    return found


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory):
    """run_ranks(case, world, **arguments): what a function returns on each rank. Processes are kept.

    ``case`` is a function of the test's own module, which the ranks import, or the name of one of `rank_engines`.
    ``flavour="te"`` runs it with Transformer Engine's layers on the CPU.
    """
    kept: dict[tuple[int, str], Ranks] = {}

    def run(case: str | Callable[..., Any], world: int, flavour: str = "local", **arguments) -> list:
        name, file = (case, "") if isinstance(case, str) else (case.__name__, case.__code__.co_filename)
        folder = tmp_path_factory.mktemp(name)
        if (world, flavour) not in kept:
            kept[world, flavour] = Ranks(world, folder, flavour)
        try:
            return kept[world, flavour].run(name, file, folder, arguments)
        except BaseException:
            kept.pop((world, flavour)).close()
            raise

    yield run
    for ranks in kept.values():
        ranks.close()
