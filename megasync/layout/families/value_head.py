"""A value model's head: one number per token in place of logits, stored as in Hugging Face's token classifiers.

`AutoModelForTokenClassification` with one label loads such a folder, for every family here except Gemma 3, GLM-4.5,
MiniMax-M2, Llama 4, Kimi-K2 and Qwen3.5's text model: transformers has no token classifier of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasync.layout.families.rules import Rule, Split, Tensor

WEIGHT, BIAS = "score.weight", "score.bias"
VALUE_HEAD = (
    Rule(Split.REPLICATED, (Tensor(WEIGHT, (1, "hidden")),), "output_layer.weight", all_tokens=True),
    Rule(Split.REPLICATED, (Tensor(BIAS, (1,)),), "output_layer.bias", all_tokens=True),
)


def value_model_options(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a value model's config.json adds to that of the language model it was made from."""
    names: list[str] = hf_config.get("architectures") or []
    return {
        "architectures": [name.replace("ForCausalLM", "ForTokenClassification") for name in names],
        "classifier_dropout": 0.0,
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }
