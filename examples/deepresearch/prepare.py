"""Makes the data folder: corpus, index, questions for training and held-out ones.

    python -m deepresearch.prepare --data runs/deepresearch-data [--corpus FILE --questions FILE]

Without a corpus of your own the fictional encyclopaedia is written. What is there already and still fits is kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepresearch.corpus import encyclopaedia
from deepresearch.documents import CorpusError, lines, write_jsonl
from deepresearch.folders import DataFolder
from deepresearch.index_folder import build_index, is_current

log = logging.getLogger(__name__)

# One question of your own in so many is held out.
HELD_OUT_EVERY = 5


def prepare(data: DataFolder, embedder: Any, *, shards: int = 4, max_words: int = 40, seed: int = 0) -> None:
    """With the fictional encyclopaedia of `seed`."""
    documents, questions = encyclopaedia(seed)
    data.root.mkdir(parents=True, exist_ok=True)
    write_jsonl(data.corpus, (asdict(document) for document in documents))
    write_jsonl(data.train, (question.row() for question in questions if not question.held_out))
    write_jsonl(data.held_out, (question.row() for question in questions if question.held_out))
    _index(data, embedder, shards, max_words)


def prepare_own(
    data: DataFolder, embedder: Any, corpus: Path, questions: Path, *, shards: int = 4, max_words: int = 40
) -> None:
    """With a corpus of your own (JSONL: id, title, text) and questions (JSONL: prompt, answers). Raises CorpusError."""
    rows = read_questions(questions)
    data.root.mkdir(parents=True, exist_ok=True)
    if corpus.resolve() != data.corpus.resolve():
        shutil.copyfile(corpus, data.corpus)
    write_jsonl(data.train, (row for number, row in enumerate(rows) if number % HELD_OUT_EVERY))
    write_jsonl(data.held_out, rows[::HELD_OUT_EVERY])
    _index(data, embedder, shards, max_words)


def read_questions(path: Path) -> list[dict]:
    """Raises CorpusError naming the line that is wrong."""
    rows = []
    for number, line in enumerate(lines(path), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CorpusError(f"{path}, line {number}: is no JSON ({error})") from error
        if not (isinstance(row, dict) and isinstance(row.get("prompt"), str) and _texts(row.get("answers"))):
            raise CorpusError(f"{path}, line {number}: needs `prompt`, a text, and `answers`, a list of texts")
        rows.append(row)
    return rows


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)


def _index(data: DataFolder, embedder: Any, shards: int, max_words: int) -> None:
    if is_current(data.index, data.corpus, embedder, shards, max_words):
        log.info("the index in %s is up to date", data.index)
        return
    log.info("embedding the passages of %s", data.corpus)
    build_index(data.index, data.corpus, embedder, shards, max_words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder to make")
    parser.add_argument("--corpus", type=Path, help="your own: a JSON object with id, title and text in each line")
    parser.add_argument("--questions", type=Path, help="your own: a JSON object with prompt and answers in each line")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--max-words", type=int, default=40, help="words of a passage")
    options = parser.parse_args()
    if (options.corpus is None) != (options.questions is None):
        parser.error("--corpus and --questions go together")
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    from deepresearch.embedder import Embedder

    data, limits = DataFolder(options.data), {"shards": options.shards, "max_words": options.max_words}
    try:
        if options.corpus:
            prepare_own(data, Embedder(), options.corpus, options.questions, **limits)
        else:
            prepare(data, Embedder(), **limits)
    except CorpusError as error:
        parser.exit(1, f"{error}\n")
    print(f"{data.root} is ready")


if __name__ == "__main__":
    main()
