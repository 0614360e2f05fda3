"""The index on disk: shards, passages and `meta.json`, which says what they were made from.

Invariant: an index is opened only with the corpus and the embedder that it was built with, and only whole. `open_index`
guarantees it by digests; the folder appears under its name when it is complete.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from deepresearch.documents import Passage, lines, passages, read_documents, write_jsonl
from deepresearch.sharded_index import split
from megasync.base.files import new_folder

META, PASSAGES = "meta.json", "passages.jsonl"


class StaleIndex(RuntimeError):
    """The index is damaged or belongs to another corpus or embedder. Says which, and how to build it again."""


def build_index(folder: Path, corpus: Path, embedder: Any, shards: int, max_words: int) -> None:
    """Cuts the corpus into passages of up to `max_words` words, embeds them and replaces `folder`."""
    pieces = [piece for document in read_documents(corpus) for piece in passages(document, max_words)]
    # With the title, for most sentences call their subject "it".
    vectors = embedder.encode([f"{piece.title}. {piece.text}" for piece in pieces])
    with new_folder(folder, replace=True) as unfinished:
        write_jsonl(unfinished / PASSAGES, (asdict(piece) for piece in pieces))
        files = [unfinished / PASSAGES]
        for number, part in enumerate(split(vectors, shards)):
            files.append(unfinished / f"shard-{number:03d}.npy")
            np.save(files[-1], part)
        meta = {
            "corpus": _digest(corpus),
            "embedder": embedder.digest,
            "embedder_name": embedder.name,
            "shards": shards,
            "max_words": max_words,
            "files": {file.name: _digest(file) for file in files},
        }
        (unfinished / META).write_text(json.dumps(meta, indent=2))


def open_index(folder: Path, corpus: Path, embedder: Any) -> tuple[list[Path], list[Passage]]:
    """The files of the shards, and the passages by row. Raises StaleIndex."""
    meta = _meta(folder)
    if meta["corpus"] != _digest(corpus):
        raise _stale(folder, f"{corpus} has changed since")
    if meta["embedder"] != embedder.digest:
        raise _stale(folder, "it was built with another embedder")
    for name, digest in meta["files"].items():
        if not (folder / name).is_file() or _digest(folder / name) != digest:
            raise _stale(folder, f"{name} is missing or damaged")
    files = shard_files(folder)
    rows = [Passage(**json.loads(line)) for line in lines(folder / PASSAGES)]
    if len(rows) != (vectors := sum(len(np.load(file, mmap_mode="r")) for file in files)):
        raise _stale(folder, f"it has {vectors} vectors for {len(rows)} passages")
    return files, rows


def shard_files(folder: Path) -> list[Path]:
    """The files of the shards in their order. Raises StaleIndex."""
    return [folder / name for name in _meta(folder)["files"] if name != PASSAGES]


def embedder_name(folder: Path) -> str:
    """The name in EMBEDDERS of what the index was built with. Raises StaleIndex."""
    return _meta(folder)["embedder_name"]


def is_current(folder: Path, corpus: Path, embedder: Any, shards: int, max_words: int) -> bool:
    """Whether `build_index` with these arguments would make what is there already."""
    try:
        open_index(folder, corpus, embedder)
    except StaleIndex:
        return False
    meta = _meta(folder)
    return (meta["shards"], meta["max_words"]) == (shards, max_words)


def _meta(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / META).read_text())
    except (OSError, ValueError) as error:
        raise _stale(folder, f"{META} cannot be read ({error})") from error


def _stale(folder: Path, why: str) -> StaleIndex:
    return StaleIndex(f"the index {folder} is refused: {why}; build it again with `python -m deepresearch.prepare`")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
