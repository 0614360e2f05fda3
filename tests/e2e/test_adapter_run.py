"""A run that trains adapters, merged on real servers or beside their model: killed, resumed, exported in both forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from random_adapters import write_adapters
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.real


@pytest.fixture
def config(miniature, transport: str) -> Path:
    return miniature(
        schedule={"total_steps": 4, "max_staleness": 0},
        rollout={"servers": 1, "deterministic": True},
        trainer={"tensor_parallel": 2, "lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"lr": 1.0e-2}},
        # Every response has a gradient, whatever its reward.
        algorithm={"entropy_coef": 0.01},
        sync={"parity_every": 1, "transport": transport},
        checkpoint={"every_steps": 2},
        data={"eval": None},
        eval=None,
    )


def greedy(folder, prompt: str) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :])


@pytest.mark.matrix
def test_another_adapter_answers_beside_the_one_that_is_trained(miniature, launch, the_run_dir, digits_model, tmp_path):
    """On the same servers, through the router: whatever the policy has become, the set's adapter answers alike."""
    other, merged = write_adapters(str(digits_model), tmp_path / "other")
    rows = {"kind": "digits", "source": "copy", "size": 4, "seed": 1, "options": {"length": 3}}
    config = miniature(
        schedule={"total_steps": 2},
        rollout={"servers": 1},
        trainer={"tensor_parallel": 1, "lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"lr": 5.0e-2}},
        algorithm={"entropy_coef": 0.01},
        sync={"transport": "adapters"},
        data={"eval": None},
        eval={"every_steps": 1, "samples": 4, "sets": {"other": {"data": rows, "adapter": str(other)}}},
        checkpoint={"export": False},
    )
    run = launch("train", config)
    assert run.wait() == 0, run.output
    answers = [json.loads(line) for line in (the_run_dir() / "samples.jsonl").read_text().splitlines()]
    assert {answer["step"] for answer in answers} == {0, 1, 2}
    texts = {answer["prompt"]: greedy(merged, answer["prompt"]) for answer in answers}
    assert all(answer["text"] == texts[answer["prompt"]] for answer in answers)
    assert any(text != greedy(digits_model, prompt) for prompt, text in texts.items())


# Servers get the adapters alone or, in the full tier, merged weights.
@pytest.mark.parametrize("transport", ["adapters", pytest.param("auto", marks=pytest.mark.matrix)])
def test_adapters_train_on_real_servers_and_survive_a_kill(config, launch, the_run_dir, tmp_path):
    run = launch("train", config)
    run.wait_for("step 3/")
    run.process.kill()
    run.wait()
    assert run.survivors() == [], "a killed controller takes everything with it"
    run = launch("resume", the_run_dir())
    assert run.wait() == 0, run.output
    run_dir = the_run_dir()
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
