"""Two tenants train while ranks, servers, the driver and clients die or hang, and end where a quiet run ends."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from queue import Queue

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from waits import PATIENCE, wait_until

from megasync.service.checkpoints import folder_of
from megasync.service.records import Checkpoint

pytestmark = [pytest.mark.real, pytest.mark.extra]

# Also of a resumed service. What hangs is stopped (SIGSTOP) and never goes on by itself.
FAULTS = ("rank killed", "server killed", "client killed", "driver killed", "rank killed", "client killed")
KINDS = ("rank killed", "rank hangs", "server killed", "server hangs", "client killed", "driver killed")
MARKS = {"rank": "TenantTrainerRank", "server": "sglang::scheduler"}
# A script that is killed and started again goes on from the last state that it saved. What it trains on is fixed, so
# that nothing depends on what was sampled; it samples in between, with the adapters of each step.
CLIENT = """
import json, random, sys
from pathlib import Path
import numpy as np
import tinker

model, seed, steps, progress = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])

def data(step, part):
    draw = random.Random(f"{seed} {step} {part}")
    rows = [[draw.randrange(10) for _ in range(draw.randrange(4, 12))] for _ in range(6)]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": np.array(row[1:]), "weights": np.ones(len(row) - 1, np.float32)},
        )
        for row in rows
    ]

service = tinker.ServiceClient()
done, path = json.loads(progress.read_text()) if progress.exists() else (0, None)
if path is None:
    training = service.create_lora_training_client(base_model=model, rank=4 + seed, seed=seed)
else:
    training = service.create_training_client_from_state_with_optimizer(path)
for step in range(done, steps):
    passes = [training.forward_backward(data(step, part), "cross_entropy") for part in range(2)]
    stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-2))
    sampler = training.save_weights_and_get_sampling_client()
    asked = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 4, tinker.SamplingParams(max_tokens=8))
    print("asked", flush=True)
    assert len(asked.result().sequences) == 4 and len(passes[1].result().loss_fn_outputs) == 6
    stepped.result()
    path = training.save_state(f"step{step}", overwrite=True).result().path
    draft = progress.with_suffix(".draft")
    draft.write_text(json.dumps([step + 1, path]))
    draft.rename(progress)
    print("step", flush=True)
"""


class Script:
    """A client's script, which is started again whenever it was killed."""

    def __init__(
        self, seed: int, model: str, steps: int, progress: Path, environment: dict[str, str], lines: Queue[str]
    ) -> None:
        self._command = [sys.executable, "-c", CLIENT, model, str(seed), str(steps), str(progress)]
        self._environment, self._lines = environment, lines
        self.failure = ""
        self.process = self._start()
        threading.Thread(target=self._follow, daemon=True).start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def _follow(self) -> None:
        while True:
            assert self.process.stdout is not None and self.process.stderr is not None
            for line in self.process.stdout:
                self._lines.put(line)
            error = self.process.stderr.read()
            if (code := self.process.wait()) != -signal.SIGKILL:
                self.failure = error if code else ""
                self._lines.put("ended")
                return
            self.process = self._start()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def adapters(run_dir: Path, steps: int, progress: Path) -> dict[str, np.ndarray]:
    """The factors and Adam's moments of the last state that a script has saved."""
    done, path = json.loads(progress.read_text())
    assert done == steps
    with sqlite3.connect(run_dir / "service" / "service.db") as db:
        (data,) = db.execute("SELECT data FROM records WHERE kind = 'checkpoint' AND id = ?", (path,)).fetchone()
    folder = run_dir / "service" / folder_of(msgspec.msgpack.decode(data, type=Checkpoint).adapter)
    return load_file(folder / "adapter_model.safetensors") | load_file(folder / "optimizer.safetensors")


@pytest.fixture
def serve(miniature, launch, tmp_path):
    """Runs the scripts to their ends on a service, with faults after random lines, and returns their adapters."""

    def run(name: str, steps: int, faults: tuple[str, ...] = (), seed: int = 0) -> list[dict[str, np.ndarray]]:
        config = miniature(
            **dict.fromkeys(("data", "eval", "schedule", "run_root")),
            trainer={"tensor_parallel": 1, "lora": {"rank": 8}},
            serve={"port": free_port()},
            timeouts={"train_step": 60},
        )
        service = launch("serve", config, f"run_root={tmp_path / name}")
        service.wait_for("TINKER_BASE_URL")
        (run_dir,) = (tmp_path / name).iterdir()
        environment = {
            "TINKER_BASE_URL": re.findall(r"TINKER_BASE_URL=(\S+)", service.output)[-1],
            "TINKER_API_KEY": (run_dir / "keys").read_text().split()[1],
            "TINKER_TELEMETRY": "0",
            "PATH": "/usr/bin:/bin",
            "HF_HUB_OFFLINE": "1",
        }
        model = re.findall(r"serving (\S+)\. ", service.output)[-1]
        lines: Queue[str] = Queue()
        files = [tmp_path / f"{name}-{number}.json" for number in range(2)]
        scripts = [Script(number, model, steps, file, environment, lines) for number, file in enumerate(files)]
        draw = random.Random(seed)
        # Both scripts together write 4 lines a step.
        moments = sorted(draw.sample(range(1, 4 * steps - 3), len(faults)))
        ended = written = 0
        try:
            while ended < len(scripts):
                ended += lines.get(timeout=PATIENCE) == "ended"
                assert not any(script.failure for script in scripts), [script.failure for script in scripts]
                written += 1
                while moments and moments[0] <= written:
                    fault, *faults = faults
                    print(f"after {moments.pop(0)} lines: {fault}", flush=True)
                    kind = fault.split()[0]
                    if kind == "client":
                        draw.choice([script for script in scripts if script.process.poll() is None]).process.kill()
                    elif kind == "driver":
                        service.die()
                        service = launch("resume", run_dir)
                        service.wait_for("TINKER_BASE_URL")
                    else:
                        victim = draw.choice(wait_until(partial(service.find, MARKS[kind])))
                        victim.kill() if fault.endswith("killed") else victim.suspend()
        finally:
            for script in scripts:
                script.process.kill()
        service.signal(signal.SIGINT)
        assert service.wait() == 0, service.output
        assert "stopping: SIGINT" in service.output and service.survivors() == []
        assert environment["TINKER_API_KEY"] not in service.output
        return [adapters(run_dir, steps, file) for file in files]

    return run


@pytest.mark.parametrize(
    ("steps", "faults"),
    [
        (5, FAULTS),
        # Twenty minutes and more. Clients give up by themselves where the service is away for five.
        pytest.param(
            80,
            tuple(random.Random(0).choices(KINDS, k=32)),
            marks=[pytest.mark.soak, pytest.mark.timeout(7200)],
        ),
    ],
)
def test_adapters_after_faults_everywhere_are_those_of_a_quiet_run(serve, steps, faults):
    pytest.importorskip("tinker")
    quiet, disturbed = serve("quiet", steps), serve("disturbed", steps, faults, seed=3)
    for expected, found in zip(quiet, disturbed, strict=True):
        assert expected.keys() == found.keys() and any(np.abs(each).max() > 0.01 for each in found.values())
        for name, values in expected.items():
            np.testing.assert_array_equal(values, found[name], err_msg=name)
