"""SGLang's own model classes, under the name that SGLang looks up in a module of external models."""

from importlib import import_module

MODULES = (
    "deepseek_v2",
    "gemma3_causal",
    "gemma3_mm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "minimax_m2",
    "mistral",
    "qwen2",
    "qwen2_classification",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_classification",
    "qwen3_moe",
    "qwen3_next",
)

_entries = (import_module(f"sglang.srt.models.{module}").EntryClass for module in MODULES)
EntryClass = [cls for entry in _entries for cls in (entry if isinstance(entry, list) else [entry])]
