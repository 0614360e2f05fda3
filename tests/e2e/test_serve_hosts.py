"""A training service over two hosts with networks of their own, of which the servers' one loses its power."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from namespaces import FakeHosts, permitted

SCRIPT = Path(__file__).parents[2] / "launch" / "multi_node.sh"
# Trains and samples until it is killed.
CLIENT = """
import itertools, sys
import tinker

training = tinker.ServiceClient().create_lora_training_client(base_model=sys.argv[1], rank=4)
inputs = {"target_tokens": [1, 2, 10, 2], "weights": [0.0, 0.0, 0.0, 1.0]}
data = [tinker.Datum(model_input=tinker.ModelInput.from_ints([12, 1, 2, 10]), loss_fn_inputs=inputs)]
losses = []
for step in itertools.count(1):
    losses.append(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    sampler = training.save_weights_and_get_sampling_client()
    sampled = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 4, tinker.SamplingParams(max_tokens=8)).result()
    assert len(sampled.sequences) == 4
    assert losses[-1] <= losses[0], losses
    print(f"step {step} done", flush=True)
"""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not permitted(), reason="needs root, namespaces, and iproute2 and util-linux"),
]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    made = FakeHosts(tmp_path, 2)
    yield made
    made.close()


def test_a_service_over_two_hosts_goes_on_after_losing_that_of_its_servers(
    hosts: FakeHosts, miniature: Callable[..., Path], execute, tmp_path: Path
) -> None:
    pytest.importorskip("tinker")
    config = miniature(
        **dict.fromkeys(("data", "eval", "schedule")),
        trainer={"tensor_parallel": 1, "lora": {"rank": 8}},
        rollout={"servers": 1},
        cluster={"devices_per_node": 2},
        serve={},
    )
    roles = ("--hosts", "host0=trainer,host1=rollout", "--shell", hosts.shell, "--continue", tmp_path / "this.run")
    service = execute("bash", SCRIPT, config, *roles)
    service.wait_for("TINKER_BASE_URL")
    (run_dir,) = (path for path in (tmp_path / "runs").iterdir() if (path / "keys").exists())
    key = (run_dir / "keys").read_text().split()[1]
    variables = {
        "TINKER_BASE_URL": re.findall(r"TINKER_BASE_URL=(\S+)", service.output)[-1],
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    model = re.findall(r"serving (\S+)\. ", service.output)[-1]
    environment = [f"{name}={value}" for name, value in variables.items()]
    client = execute(hosts.shell, "host0", "env", *environment, sys.executable, "-c", CLIENT, model)
    client.wait_for("step 2 done")

    printed = len(service.output)
    hosts.crash("host1")
    hosts.switch_on("host1")
    service.wait_for("[host1] Ray node exited", printed)
    done = max(int(step) for step in re.findall(r"step (\d+) done", client.output))
    # One more may have been under way.
    client.wait_for(f"step {done + 2} done")
    service.wait_for("[host1] Ray node ready", printed)

    # The same command continues it, and the client goes on where it was.
    service.signal(signal.SIGINT)
    assert service.wait() == 0, service.output
    assert hosts.processes("host1") == []
    again = execute("bash", SCRIPT, config, *roles)
    again.wait_for("resuming with the configuration ")
    again.wait_for("TINKER_BASE_URL")
    done = max(int(step) for step in re.findall(r"step (\d+) done", client.output))
    client.wait_for(f"step {done + 2} done")
    client.kill_everything()
    again.signal(signal.SIGINT)
    assert again.wait() == 0, again.output
    assert hosts.processes("host0") == hosts.processes("host1") == []
    assert key not in service.output + again.output
