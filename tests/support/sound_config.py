import json
from pathlib import Path

import pytest
from header_files import write_headers

from megasync.config import Config, load_config

# Divisible by 1, 2 and 4 only, so that invalid splits are easy to configure.
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder that looks complete."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    write_headers(folder)
    (folder / "tokenizer.json").touch()
    return folder


@pytest.fixture
def make(model: Path, tmp_path: Path):
    """Makes a valid configuration with overrides."""

    def load(*overrides: str) -> Config:
        values = {
            "model": {"path": str(model)},
            "data": {
                "train": {"kind": "digits", "source": "copy"},
                "eval": {"kind": "digits", "source": "copy", "split": "test"},
            },
            "run_root": str(tmp_path / "runs"),
        }
        return load_config(values, overrides)

    return load
