"""Weights to and from Megatron's own checkpoint format, by the command line, and as Megatron's own model reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.processes


def convert(command: str, *paths: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "megasync", command, *map(str, paths)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.matrix
def test_a_folder_comes_back_bit_for_bit(models, tmp_path: Path) -> None:
    source, there, back = Path(models["qwen3_moe"]), tmp_path / "megatron", tmp_path / "back"
    done = convert("to-megatron", source, there)
    assert done.returncode == 0, done.stderr
    done = convert("from-megatron", there, source, back)
    assert done.returncode == 0, done.stderr
    before, after = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.matrix
def test_other_models_and_folders_that_exist_are_refused(models, tmp_path: Path) -> None:
    there = tmp_path / "megatron"
    assert convert("to-megatron", models["qwen3"], there).returncode == 0
    for words, *command in (
        (f"{there} has no ", "from-megatron", there, models["qwen2"], tmp_path / "other"),
        (f"{there} exists and is not empty", "to-megatron", models["qwen3"], there),
        ("is no checkpoint of Megatron's format", "from-megatron", tmp_path, models["qwen3"], tmp_path / "other"),
        ("models of type glm4 have parts", "to-megatron", models["glm4"], tmp_path / "glm4"),
    ):
        refused = convert(*command)
        assert refused.returncode == 2 and words in " ".join(refused.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


EXPERTS = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 1}


# With biases and a tied output layer; with experts, whose norms Megatron's local layers read under another name.
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flavour", "name", "trainer"),
    [("local", "qwen2", {"tensor_parallel": 2}), ("te", "qwen2", {"tensor_parallel": 2}), ("te", "qwen3_moe", EXPERTS)],
)
def test_megatrons_own_model_reads_it_on_another_topology(models, run_ranks, tmp_path: Path, flavour, name, trainer):
    done = convert("to-megatron", models[name], tmp_path / name)
    assert done.returncode == 0, done.stderr
    checkpoints = {name: str(tmp_path / name)}
    ranks = run_ranks(megatron_reads, 2, flavour, models={name: models[name]}, checkpoints=checkpoints, trainer=trainer)
    assert ranks == [{name: []}] * 2


def megatron_reads(models, checkpoints, trainer):
    """The parameters that Megatron's own GPTModel in this layout reads from a checkpoint of Megatron's format, with
    other values than an engine reads from the Hugging Face folder.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_model import GPTModel
    from rank_engines import DEVICE, close, make_engine

    from megasync.trainer.architecture import rope_parameters
    from megasync.trainer.layer_specs import chunk_specs
    from megasync.trainer.model import named_weights, transformer_config

    results = {}
    for name, path in models.items():
        engine = make_engine(path, trainer)
        layout = engine.layout
        config = transformer_config(layout, engine.trainer_config, DEVICE, torch.float32)
        rope = rope_parameters(layout.hf_config)
        model = GPTModel(
            config,
            chunk_specs(config, layout, range(layout.sizes.layers), DEVICE.spec, rope),
            vocab_size=layout.padded_vocab,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=layout.tied,
        )
        for param in model.parameters():
            param.data.fill_(7.0)
        # Without Transformer Engine's extra state.
        state = {"model": model.sharded_state_dict()}
        loaded = dist_checkpointing.load(state, checkpoints[name], strict="log_unexpected")
        model.load_state_dict(loaded["model"], strict=False)
        own = named_weights([model])
        results[name] = [param for param, weight in engine.weights.items() if not torch.equal(own[param], weight)]
        close(engine)
    return results
