"""Which family comes nearest to a model that no table covers, and what tells the two apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, cast

from megasync.base.importing import quick_imports

# Options that say nothing about parameters or about what a layer computes.
_INCIDENTAL = {
    *("torch_dtype", "auto_map", "pretraining_tp", "quantization_config", "text_config", "vision_config"),
    # How transformers spells them depends on its version.
    *("rope_theta", "rope_scaling", "rope_parameters"),
}
_SHOWN = 6


def nearest_family(values: Mapping[str, Any], families: Iterable[str]) -> str:
    """The end of a sentence about an unknown model_type: the family whose options are most like its config.json's.

    Empty if no family shares an option with it.
    """
    text = cast("Mapping[str, Any] | None", values.get("text_config"))
    known, common = _options_of(tuple(families))
    options = {*values, *(text if isinstance(text, Mapping) else ())} - common
    nearest = max(known, key=lambda kind: len(options & known[kind]) / len(options | known[kind]))
    if not options & known[nearest]:
        return ""
    other = sorted(options - known[nearest])
    more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
    if not other:
        return f"; the nearest is {nearest}, which has the same options: the two differ in code alone"
    return f"; the nearest is {nearest}, which has no {', '.join(other[:_SHOWN])}{more}"


@cache
def _options_of(families: tuple[str, ...]) -> tuple[dict[str, set[str]], set[str]]:
    """The options of each family that transformers knows, and those that are common to all or incidental."""
    with quick_imports():
        from transformers import CONFIG_MAPPING, PretrainedConfig

    common = {*PretrainedConfig().to_dict(), *_INCIDENTAL}
    present = (kind for kind in families if kind in CONFIG_MAPPING)
    return {kind: {*CONFIG_MAPPING[kind]().to_dict()} - common for kind in present}, common
