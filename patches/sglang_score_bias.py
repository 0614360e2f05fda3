"""Zeroes a spurious bias of classifier heads in SGLang 0.5.23, so that scores are those of the checkpoint.

SGLang gives the heads of Qwen2ForSequenceClassification and Qwen3ForSequenceClassification a bias, which these models
do not have. No checkpoint contains it, so it keeps its random initial values, and every server adds a different
constant to its scores. With the patch the bias starts at zero; a checkpoint with a bias still overwrites it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megasync_patches import Patch

_CLASSES = (
    ("sglang.srt.models.qwen2_classification", "Qwen2ForSequenceClassification"),
    ("sglang.srt.models.qwen3_classification", "Qwen3ForSequenceClassification"),
)


def _with_zero_bias(cls: type) -> None:
    make = cls.__init__

    def make_and_zero(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.score.bias is not None:
            self.score.bias.data.zero_()

    cls.__init__ = make_and_zero


def _apply() -> None:
    for module, name in _CLASSES:
        _with_zero_bias(getattr(import_module(module), name))


PATCH = Patch(
    name="sglang_score_bias",
    package="sglang",
    versions=("0.5.23",),
    reason="Qwen classifiers add a bias that no checkpoint contains and that is random on each server",
    apply=_apply,
    kinds=("cpu", "cuda"),
)
