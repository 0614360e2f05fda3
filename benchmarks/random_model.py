"""Creates models with random weights as Hugging Face folders.

    python benchmarks/random_model.py configs/models/qwen3_0_6b.json FOLDER [--tokenizer MODEL] [--dtype bfloat16]

writes a model of the shape of a config.json, with the tokenizer of another model, which may have fewer tokens.
`make_random_model` creates a Llama of a given size without a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from megasync.layout.layout import Layout
from megasync.layout.topology import Topology


def make_random_model(folder: Path, gigabytes: float, dtype: str) -> Path:
    """Writes about `gigabytes` (10^9 bytes) of weights, as layers with hidden size 1,536. Returns `folder`."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
    item = getattr(torch, dtype).itemsize

    def size(layers: int) -> int:
        shapes = Layout(config | {"num_hidden_layers": layers}, Topology()).hf_tensors.values()
        return item * sum(torch.Size(shape).numel() for shape in shapes)

    layers = max(1, round((gigabytes * 1e9 - size(1)) / (size(2) - size(1)) + 1))
    return write_random_model(folder, config | {"num_hidden_layers": layers}, dtype)


def write_random_model(folder: Path, config: dict, dtype: str) -> Path:
    """Writes a model of this config.json: norms are one, all other weights normal with a deviation of 0.02."""
    torch.manual_seed(0)
    tensors = {
        name: (torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.02).to(getattr(torch, dtype))
        for name, shape in Layout(config, Topology()).hf_tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="folder of a model whose tokenizer files are copied")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    write_random_model(given.folder, json.loads(given.config.read_text()), given.dtype)
    for path in given.tokenizer.iterdir() if given.tokenizer else ():
        if path.name not in ("config.json", "generation_config.json") and path.suffix != ".safetensors":
            shutil.copy(path, given.folder)


if __name__ == "__main__":
    main()
