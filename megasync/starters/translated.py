"""The files of a run that is translated from another library's configuration, and what to do with them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from megasync.starters.commented import commented
from megasync.starters.templates import CONFIG
from megasync.translate import Translation, report

REPORT = "translation.md"


def translated_files(translation: Translation, name: str) -> dict[str, bytes]:
    """The configuration and the report of a translation, by their paths, for runs of this name."""
    head = f"Translated from {translation.path.name} of {translation.source}. {REPORT} says what differs from it."
    return {
        CONFIG: commented({"name": name} | translation.config, head).encode(),
        REPORT: report(translation).encode(),
    }


def after_translation(folder: Path, translation: Translation, files: Mapping[str, bytes]) -> str:
    """The message after a translation was written: what is left to do, and the commands to go on with."""
    options = len({entry.option for entry in translation.translated})
    lines = [f"Translated {options} options of {translation.path} to {folder}: {', '.join(files)}"]
    if left := translation.of("open"):
        lines += ["To be filled in:", *(f"  {': '.join(filter(None, (each.option, each.text)))}" for each in left)]
    if unknown := translation.of("unknown"):
        lines.append(f"{len(unknown)} options are unknown; {REPORT} names them")
    config = shlex.quote(str(folder / CONFIG))
    lines += [f"Next, in the folder in which {translation.path.name} is run, because paths are relative to it:"]
    lines += [f"  megasync plan {config}", f"  megasync {'sft' if translation.supervised else 'train'} {config}"]
    return "\n".join(lines)
