"""Configurations of other libraries: verl, slime and TRL.

`translate` reads a file of one of them, never runs it, and returns megasync's keys with what has no counterpart and
what changes in meaning; `report` says that as Markdown. `table` is the data: the translation, its tests and
docs/knobs.md (`page`) come from it. `options`, with `shell` and `script`, reads files, and `values` computes what
follows from several options.
"""

from megasync.translate.report import report
from megasync.translate.translation import Remark, Translated, Translation, translate

__all__ = ["Remark", "Translated", "Translation", "report", "translate"]
