"""Tiny Hugging Face models, in memory and in folders."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from real_servers import SIZES as SERVED_SIZES
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


def build_model(seed: int = 0, **config):
    """A random float32 model. Norms and biases are random too, to reveal swapped tensors."""
    config = {"model_type": "qwen2", **SIZES, **config}
    torch.manual_seed(seed)
    # Transformers writes into the nested values that it is given.
    config = AutoConfig.for_model(**copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.eval()


@pytest.fixture(scope="session")
def make_model():
    return build_model


@pytest.fixture(scope="session")
def save_model():
    """Writes a model to a folder and returns its config.json as a dict."""

    def save(model, path: Path, **options) -> dict:
        model.save_pretrained(path, **options)
        return json.loads((path / "config.json").read_text())

    return save


@pytest.fixture(scope="session")
def models(make_model, save_model, tmp_path_factory):
    """Three models of one shape, as (folder, model) by seed, and their config; real servers start with the first."""
    found = []
    for seed in range(3):
        model = make_model(seed, **SERVED_SIZES)
        folder = tmp_path_factory.mktemp(f"model{seed}")
        config = save_model(model, folder)
        found.append((folder, model))
    return found, config
