"""verl's weight transfer from shards, between separate processes: two trainer ranks and two rollout workers."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl.version", reason="verl is not installed; run `megasync install verl`")

from safetensors.torch import load_file
from tiny_models import make_tiny_model
from verl.checkpoint_engine import CheckpointEngineRegistry

from megasync.errors import ConfigError, SyncError
from megasync.integrations.verl.checkpoint_engine import MegasyncCheckpointEngine

PROCESS = Path(__file__).with_name("verl_transfer.py")
# Seconds for all transfers together; several times what they need on two busy cores.
TIMEOUT = 300


class Side:
    def __init__(self, role: str, rank: int, model: Path, folder: Path) -> None:
        self.file, log = folder / f"{role}-{rank}.safetensors", folder / f"{role}-{rank}.txt"
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(PROCESS), role, str(rank), str(model), str(self.file)],
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
    found = [Side(role, rank, model, folder) for role, rank in places]

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


def check_whole(sides, model):
    """Transfers, and compares what the rollout workers received with the model's folder."""
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(model / "model.safetensors").items()}
    assert transfer(sides) == [{"tensors": 0}] * 2 + [{"tensors": len(expected)}] * 2
    for side in sides[2:]:
        received = load_file(side.file)
        assert received.keys() == expected.keys()
        assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
        side.file.unlink()


def test_verl_finds_the_backend():
    assert CheckpointEngineRegistry.get("megasync") is MegasyncCheckpointEngine


def test_every_rank_receives_its_role_and_number():
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


@pytest.mark.parametrize(
    "name, options",
    [("bucket_megabytes", {"bucket_size": 0}), ("timeout", {"timeout": "600"}), ("timeout", {"timeout": 0})],
)
def test_an_invalid_setting_is_refused_by_name(name, options):
    with pytest.raises(ConfigError, match=name):
        MegasyncCheckpointEngine(**{"bucket_size": 100, **options})


async def test_weights_of_another_engine_are_refused():
    with pytest.raises(SyncError, match="another backend"):
        await MegasyncCheckpointEngine(100).send_weights(iter([("a", torch.ones(3))]))


def test_every_rollout_worker_assembles_the_model_folder_bitwise(sides, model):
    check_whole(sides, model)


@pytest.mark.parametrize(
    "fault, reason",
    [
        ({"trainer1": "breaks down"}, "ValueError: no more tensors"),
        ({"trainer1": "is damaged"}, "from trainer 1"),
        ({"rollout0": "breaks down"}, "ValueError: no room"),
    ],
    ids=["a trainer rank breaks down", "bytes are damaged", "a rollout worker breaks down"],
)
def test_a_failed_transfer_fails_on_every_process_and_the_next_one_succeeds(sides, model, fault, reason):
    answers = transfer(sides, **fault)
    if "rollout0" in fault and "tensors" in answers[3]:
        # The other worker had everything already when this one broke down.
        answers.pop()
    errors = [answer["error"] for answer in answers]
    assert any(reason in error for error in errors)
    assert all("step 4 failed" in error for error in errors if not error.startswith("ValueError"))
    check_whole(sides, model)
