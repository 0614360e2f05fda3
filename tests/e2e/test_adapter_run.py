"""A run that trains adapters, merged on real servers or beside their model: killed, resumed, exported in both forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.real


@pytest.fixture(params=["auto", "adapters"])
def config(miniature, request) -> Path:
    return miniature(
        schedule={"total_steps": 4, "groups_per_step": 4, "samples_per_group": 4, "max_staleness": 0},
        rollout={"servers": 1, "deterministic": True},
        trainer={"tensor_parallel": 2, "lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"lr": 1.0e-2}},
        # Every response has a gradient, whatever its reward.
        algorithm={"entropy_coef": 0.01},
        sync={"parity_every": 1, "transport": request.param},
        checkpoint={"every_steps": 2},
        data={"eval": None},
        eval=None,
    )


def test_adapters_train_on_real_servers_and_survive_a_kill(config, launch, the_run_dir, tmp_path):
    run = launch("train", config)
    run.wait_for("step 3/")
    run.process.kill()
    run.wait()
    run.kill_everything()
    run_dir = the_run_dir()
    resumed = launch("resume", run_dir)
    assert resumed.wait() == 0, resumed.output
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step" in row]
    assert {row["step"] for row in rows} == {1, 2, 3, 4}
    # Servers compute what the trainer computes.
    assert all(row["train/logprob_diff"] < 1e-5 for row in rows)
    assert json.loads((run_dir / "export" / "adapter_config.json").read_text())["r"] == 4
    adapters = load_file(run_dir / "export" / "adapter_model.safetensors")
    changed = [name for name, factor in adapters.items() if name.endswith("lora_B.weight") and factor.any()]
    assert changed
    assert sum(path.stat().st_size for path in (run_dir / "checkpoints").glob("*/model-*")) < 10**6
    merged = launch("export", run_dir, tmp_path / "merged", "--merge")
    assert merged.wait() == 0, merged.output
    path = json.loads((run_dir / "export" / "adapter_config.json").read_text())["base_model_name_or_path"]
    before, after = load_file(Path(path) / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name, weight in after.items() if not weight.equal(before[name])}
    assert moved == {name.removeprefix("base_model.model.").replace("lora_B.weight", "weight") for name in changed}
