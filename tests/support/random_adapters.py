"""Random adapters for small models: as PEFT folders, merged into the model, and what Hugging Face makes of them."""

import json
import shutil

import torch
from family_layouts import reference
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megasync.config.schema import LoraConfig, TrainerConfig
from megasync.layout.adapter import AdapterLayout, AdapterShape, adapter_config, adapter_layout
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology

RANK, ALPHA = 3, 6.0
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def adapters_of(path, options=None, flavour="local") -> AdapterLayout:
    trainer = TrainerConfig(**(options or {}), lora=LoraConfig(rank=RANK, alpha=ALPHA))
    return adapter_layout(Layout(read_hf_config(path), Topology.from_config(trainer), flavour), trainer)


def write_adapters(path, folder, seed=5):
    """(PEFT folder of random adapters for the model at ``path``, folder of the model with these merged)."""
    layout = adapters_of(path)
    generator = torch.Generator().manual_seed(seed)
    factors = {
        name: torch.randn(shape, generator=generator) * (shape[1] ** -0.5 if name.endswith(DOWN) else 0.05)
        for name, shape in layout.hf_tensors.items()
    }
    peft, merged = folder / "peft", folder / "merged"
    peft.mkdir(parents=True)
    save_file(factors, peft / "adapter_model.safetensors")
    (peft / "adapter_config.json").write_text(json.dumps(adapter_config(layout.shape, path)))
    shutil.copytree(path, merged)
    weights = load_file(merged / "model.safetensors")
    for name, (down, up) in pairs(factors).items():
        weights[name] += ALPHA / RANK * up @ down
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return peft, merged


def pairs(factors):
    """Name of the adapted weight -> (down, up)."""
    names = [name.removeprefix(PREFIX).removesuffix(DOWN) for name in factors if name.endswith(DOWN)]
    return {f"{name}.weight": (factors[PREFIX + name + DOWN], factors[PREFIX + name + UP]) for name in names}


def adapted_reference(peft, merged, rows):
    """(log-probs, loss, gradients of the factors by their names), from Hugging Face's gradients of merged weights."""
    logprobs, loss, grads = reference(merged, rows)
    found = {}
    for name, (down, up) in pairs(load_file(peft / "adapter_model.safetensors")).items():
        grad = torch.zeros_like(up @ down) if grads[name] is None else grads[name]
        stem = PREFIX + name.removesuffix(".weight")
        found[stem + DOWN], found[stem + UP] = ALPHA / RANK * up.T @ grad, ALPHA / RANK * grad @ down.T
    return logprobs, loss, found


def write_peft(path, folder, seed, rank=RANK, targets=("q_proj", "k_proj", "v_proj", "o_proj"), alpha=32.0):
    """Writes random adapters of some projections for the model at ``path``; Hugging Face's model with them merged.

    Those of ``lm_head`` leave the embedding that it may be tied to as it is.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # Also if it was tied.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in targets:
                up_rows, down_columns = module.weight.shape
                down = torch.randn(rank, down_columns, generator=generator) * down_columns**-0.5
                up = torch.randn(up_rows, rank, generator=generator) * 0.3 / alpha
                factors[PREFIX + name + DOWN], factors[PREFIX + name + UP] = down, up
                module.weight += alpha / rank * up @ down
    folder.mkdir(parents=True)
    save_file(factors, folder / "adapter_model.safetensors")
    shape = AdapterShape(rank, alpha / rank, tuple(targets))
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(shape, str(path))))
    return model
