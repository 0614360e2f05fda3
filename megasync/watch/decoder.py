"""The tokenizer that turns a run's recorded tokens into text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megasync.data.tokenizer import load_tokenizer
from megasync.errors import DataError
from megasync.models.hub import snapshot_of
from megasync.watch.responses import Decoder
from megasync.watch.run_folder import RunFolder


def decoder_of(run: RunFolder) -> tuple[Decoder, str]:
    """The tokenizer of the run's model or of its export, and why there is none."""
    named = str(run.settings.get("model.path") or "")
    problem = f"there is no folder {named!r} here" if named else "config.yaml names no model"
    # A relative path is relative to where the run was started, which is often the folder above run_root.
    folders = [Path(named), run.path.resolve().parent.parent / named] if named else []
    if (snapshot := snapshot_of(named)) is not None:
        folders.append(snapshot.folder)
    for path in (*folders, run.path / "export"):
        if path.is_dir():
            try:
                return Decoder(_tokenizer(path)), ""
            except DataError as error:
                problem = str(error)
    return Decoder(), f"Tokens are shown by their ids: {problem}."


def _tokenizer(path: Path) -> Any:
    """Without transformers where it can be: importing that takes seconds. Raises DataError."""
    try:
        return Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - the library raises nothing more precise, for a file that is missing or damaged
        return load_tokenizer(str(path))
