"""verl's weight transfer out of shards, between processes of their own: two trainer ranks and two rollout workers."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed; run `bash launch/test.sh`")

from safetensors.torch import load_file
from tiny_models import make_tiny_model
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl_transfer import fingerprint

from megasync.errors import SyncError
from megasync.integrations.verl.checkpoint_engine import MegasyncCheckpointEngine

PROCESS = Path(__file__).with_name("verl_transfer.py")
# Seconds for all transfers together; several times what they need on two busy cores.
TIMEOUT = 300


class Side:
    def __init__(self, role: str, rank: int, model: Path, log: Path) -> None:
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(PROCESS), role, str(rank), str(model)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log

    def ask(self, request) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(self._log.read_text()[-6000:])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.fixture(scope="module")
def sides(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("transfer")
    places = [("trainer", 0), ("trainer", 1), ("rollout", 0), ("rollout", 1)]
    found = [Side(role, rank, model, folder / f"{role}-{rank}.txt") for role, rank in places]

    def end():
        for side in found:
            side.process.kill()
            side.process.wait()

    watchdog = threading.Timer(TIMEOUT, end)
    watchdog.start()
    yield found
    watchdog.cancel()
    end()


def transfer(sides, **faults):
    """The answers of one transfer; ``faults`` are those of "trainer1" and so on."""
    metadata = []
    for side in sides:
        side.ask("prepare")
        metadata.append(side.answer())
    for role, arguments, mine in zip(
        ("trainer", "rollout"),
        MegasyncCheckpointEngine.build_topology(2, 2, metadata),
        (sides[:2], sides[2:]),
        strict=True,
    ):
        for place, side in enumerate(mine):
            request = {name: values[place] for name, values in arguments.items()}
            side.ask(request | {"fault": faults.get(f"{role}{place}")})
    return [side.answer() for side in sides]


@pytest.fixture(scope="module")
def expected(model) -> dict:
    tensors = load_file(model / "model.safetensors")
    return {"tensors": {name: fingerprint(tensor.to(torch.bfloat16)) for name, tensor in tensors.items()}}


def test_verl_finds_the_backend():
    assert CheckpointEngineRegistry.get("megasync") is MegasyncCheckpointEngine


def test_every_rank_is_told_who_it_is():
    metadata = [{"host": "127.0.0.1", "port": 5}, {}, {}, {}, {}]
    trainers, rollouts = MegasyncCheckpointEngine.build_topology(2, 3, metadata)
    assert trainers == {
        "rank": [0, 1],
        "role": ["trainer"] * 2,
        "workers": [3] * 2,
        "host": ["127.0.0.1"] * 2,
        "port": [5] * 2,
    }
    assert (rollouts["rank"], rollouts["role"][0], len(rollouts["port"])) == ([0, 1, 2], "rollout", 3)


async def test_weights_of_another_engine_are_refused():
    with pytest.raises(SyncError, match="another backend"):
        await MegasyncCheckpointEngine(100).send_weights(iter([("a", torch.ones(3))]))


def test_every_rollout_worker_puts_the_folder_together_bit_for_bit(sides, expected):
    assert transfer(sides) == [{"tensors": {}}] * 2 + [expected] * 2


@pytest.mark.parametrize(
    "fault, reason",
    [
        ({"trainer1": "breaks down"}, "ValueError: no more tensors"),
        ({"trainer1": "is damaged"}, "is not that of trainer 1"),
        ({"rollout0": "breaks down"}, "ValueError: no room"),
    ],
    ids=["a trainer rank breaks down", "bytes are damaged", "a rollout worker breaks down"],
)
def test_a_failure_in_the_middle_reaches_everybody_and_the_next_transfer_is_whole(sides, expected, fault, reason):
    *answers, last = transfer(sides, **fault)
    # The other rollout worker may have had everything already when the first broke down.
    errors = [answer["error"] for answer in (answers if last == expected and "rollout0" in fault else [*answers, last])]
    assert any(reason in error for error in errors)
    assert all("step 4 failed" in error for error in errors if not error.startswith("ValueError"))
    assert transfer(sides) == [{"tensors": {}}] * 2 + [expected] * 2
