"""verl's weight transfer over megasync's groups, between processes of their own."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed; run `pip install --no-deps -r launch/verl.lock`")

from verl.checkpoint_engine import CheckpointEngineRegistry

from megasync.integrations.verl.checkpoint_engine import MegasyncCheckpointEngine

PROCESS = Path(__file__).with_name("verl_transfer.py")
# Seconds for all transfers together; several times what they need on two busy cores.
TIMEOUT = 300


class Side:
    def __init__(self, role: str, log: Path) -> None:
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(PROCESS), role],
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
def sides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transfer")
    found = [Side(role, folder / f"{index}.txt") for index, role in enumerate(("trainer", "rollout", "rollout"))]

    def end():
        for side in found:
            side.process.kill()
            side.process.wait()

    watchdog = threading.Timer(TIMEOUT, end)
    watchdog.start()
    yield found
    watchdog.cancel()
    end()


def transfer(sides, fail=None):
    metadata = []
    for side in sides:
        side.ask("prepare")
        metadata.append(side.answer())
    trainers, rollouts = MegasyncCheckpointEngine.build_topology(1, len(sides) - 1, metadata)
    for index, side in enumerate(sides):
        arguments, place = (trainers, 0) if index == 0 else (rollouts, index - 1)
        request = {name: values[place] for name, values in arguments.items()}
        side.ask(request | ({"fail": fail} if index == 0 else {}))
    return [side.answer() for side in sides]


def test_verl_finds_the_backend():
    assert CheckpointEngineRegistry.get("megasync") is MegasyncCheckpointEngine


def test_only_the_first_trainer_rank_sends():
    metadata = [{"host": "127.0.0.1", "port": 5}, {}, {}, {}]
    trainers, rollouts = MegasyncCheckpointEngine.build_topology(2, 2, metadata)
    assert trainers == {"rank": [0, -1], "size": [3, 3], "host": ["127.0.0.1"] * 2, "port": [5, 5]}
    assert rollouts == {"rank": [1, 2], "size": [3, 3], "host": ["127.0.0.1"] * 2, "port": [5, 5]}


async def test_a_trainer_rank_that_does_not_send_still_makes_every_tensor():
    taken = []
    engine = MegasyncCheckpointEngine(100)
    engine.init_process_group(rank=-1, size=3, host="127.0.0.1", port=5)
    await engine.send_weights((name, taken.append(name)) for name in "abc")
    assert taken == ["a", "b", "c"]


def test_every_rollout_worker_receives_what_was_sent_also_after_a_failure(sides):
    first = transfer(sides)
    assert len(first[0]["tensors"]) == 6
    assert first[1] == first[2] == first[0]
    assert list(first[1]["tensors"]) == list(first[0]["tensors"])

    sender, *receivers = transfer(sides, fail=3)
    assert sender == {"error": "ValueError: no more tensors"}
    for receiver in receivers:
        assert receiver["error"].startswith("SyncError: weight transfer, rank ")
        assert "of step 4 failed" in receiver["error"]

    assert transfer(sides) == first
