"""The GRPO examples for verl: verl's entry point, a real SGLang server, megasync's engine as actor and reference.

The synchronous one is run in the full tier. What it does and the other does not, handing all weights to a server that
takes the rank's place, starts from what `test_verl_engine.py` compares bitwise in the standard tier.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl.version", reason="verl is not installed; run `megasync install verl`")

EXAMPLES = Path(__file__).parents[3] / "examples" / "verl"
# Seconds; several times what each needs on two busy cores.
TIMEOUT = 500
SETTINGS = [
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.save_freq=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
]
RUNS = {
    # One rank and one server, which takes its place.
    "grpo_cpu.sh": [
        "data.train_batch_size=4",
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ],
    # Two ranks and a separate server. Each step has two weight updates. For the second, the weights of before the first
    # are restored, whose probabilities must equal the server's: no prompt starts before the weights that train on it.
    "grpo_async_cpu.sh": [
        "data.train_batch_size=8",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.separate_async.num_warmup_batches=0",
    ],
}


@pytest.fixture(scope="module", params=[pytest.param("grpo_cpu.sh", marks=pytest.mark.matrix), "grpo_async_cpu.sh"])
def run(request, tmp_path_factory) -> tuple[Path, list[dict[str, float]]]:
    """(folder, metrics of each step) of two steps."""
    folder = tmp_path_factory.mktemp("grpo")
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", EXAMPLES / request.param, *SETTINGS, *RUNS[request.param]],
            env={**os.environ, "FOLDER": str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        assert process.wait(TIMEOUT) == 0, log.read_text()[-6000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    steps = [line.split(" - ") for line in log.read_text().splitlines() if "actor/grad_norm:" in line]
    return folder, [dict(map(_metric, step[1:])) for step in steps]


def _metric(text: str) -> tuple[str, float]:
    """Of verl's console: "name:0.5" or "name:np.float64(0.5)"."""
    name, _, value = text.rpartition(":")
    return name, float(re.sub(r"np\.\w+\(|\)", "", value))


def test_verls_trainer_trains(run):
    _, (first, second) = run
    for step in (first, second):
        assert step["actor/grad_norm"] > 0
        assert step["actor/lr"] == 1.3e-3
    # The policy changes; the reference does not.
    assert abs(first["actor/kl_loss"]) < second["actor/kl_loss"]


def test_the_servers_sample_with_the_weights_that_were_trained(run):
    """Probabilities of the sampled tokens, by the server and by the engine; the second step's are of new weights."""
    _, steps = run
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4


def test_verl_finds_its_checkpoint(run):
    folder, _ = run
    actor = folder / "checkpoints" / "global_step_2" / "actor"
    assert (actor / "megasync" / "COMPLETE").is_file()
    assert (actor / "huggingface" / "model.safetensors").is_file()
