"""A value model's head: one number for each token in place of logits, stored as Hugging Face's token classifiers store it.

`AutoModelForTokenClassification` of one label reads such a folder, for every family here.
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
    """What the config.json of a value model states besides that of the language model it was made from."""
    names = hf_config.get("architectures") or []
    return {
        "architectures": [name.replace("ForCausalLM", "ForTokenClassification") for name in names],
        "classifier_dropout": 0.0,
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }
