"""`megasync serve` as a user runs it: the real client trains and samples, the driver is killed and resumed, Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.real, pytest.mark.extra]

CLIENT = """
import sys
import numpy as np
import tinker

def datum():
    inputs = {"target_tokens": np.array([2, 3, 4, 5]), "weights": np.ones(4, np.float32)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3, 4]), loss_fn_inputs=inputs)

service = tinker.ServiceClient()
model, earlier = sys.argv[1], sys.argv[2:]
if earlier:
    training = service.create_training_client_from_state_with_optimizer(earlier[0])
else:
    training = service.create_lora_training_client(base_model=model, rank=4, seed=1)
losses = []
for _ in range(3):
    passed = training.forward_backward([datum()], "cross_entropy")
    step = training.optim_step(tinker.AdamParams(learning_rate=1e-2))
    losses.append(passed.result().metrics["loss:sum"])
    step.result()
sampler = training.save_weights_and_get_sampling_client()
reply = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 2, tinker.SamplingParams(max_tokens=4, seed=1)).result()
assert all(0 < len(each.tokens) <= 4 and len(each.logprobs) == len(each.tokens) for each in reply.sequences)
print("path", training.save_state("kept").result().path)
print("losses", *losses)
"""


def test_a_client_trains_samples_and_goes_on_after_the_driver_was_killed(miniature, launch, tmp_path) -> None:
    pytest.importorskip("tinker")
    config = miniature(
        data=None,
        eval=None,
        schedule=None,
        rollout={"servers": 1},
        trainer={"tensor_parallel": 1, "lora": {"rank": 8}},
        serve={"port": 0},
    )
    service = launch("serve", config)
    service.wait_for("TINKER_BASE_URL")
    (run_dir,) = (tmp_path / "runs").iterdir()
    key = (run_dir / "keys").read_text().split()[1]

    def client(output: str, *earlier: str) -> list[float]:
        url = re.findall(r"TINKER_BASE_URL=(\S+)", output)[-1]
        environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
        name = re.findall(r"serving (\S+)\. ", output)[-1]
        command = [sys.executable, "-c", CLIENT, name, *earlier]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr + service.output
        paths.append(re.findall(r"path (\S+)", done.stdout)[-1])
        return [*map(float, done.stdout.split("losses ")[1].split())]

    paths: list[str] = []
    first = client(service.output)
    assert first[2] < first[1] < first[0]
    assert key not in service.output and key not in (run_dir / "logs" / "controller.log").read_text()
    service.die()
    resumed = launch("resume", run_dir)
    resumed.wait_for("TINKER_BASE_URL")
    assert client(resumed.output, paths[0])[0] < first[2], "the optimizer's state and the adapters were kept"
    resumed.signal(signal.SIGINT)
    assert resumed.wait() == 0, resumed.output
    assert "stopping: SIGINT" in resumed.output and resumed.survivors() == []
    state = json.loads((run_dir / "state.json").read_text())
    assert state["status"] == "stopped" and state["tenants"][0]["steps"] == 6
    assert "OptimStep" in (run_dir / "logs" / "tenant-local.log").read_text()
