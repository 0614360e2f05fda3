"""Makes the data folder from local files: corpus, index, training questions and held-out ones.

    python -m deepresearch.prepare --data DIR                                              # the fictional encyclopaedia
    python -m deepresearch.prepare --data DIR --corpus corpus.jsonl --questions asked.jsonl

Files may have the keys of BrowseComp-Plus: `docid`, `text` and `url` in the corpus; `query_id`, `query`, `answer`,
`gold_docs` and `evidence_docs` in the (decrypted) questions. An index that is there already and still fits is kept.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepresearch.corpus import encyclopaedia
from deepresearch.documents import CorpusError, lines, read_documents, write_jsonl
from deepresearch.embedder import EMBEDDERS
from deepresearch.folders import DataFolder
from deepresearch.index_folder import build_index, is_current
from deepresearch.splits import HELD_OUT_EVERY, Split, decontaminated

log = logging.getLogger(__name__)

# Documents that a question of BrowseComp-Plus needs.
_EVIDENCE_KEYS = ("gold_docs", "evidence_docs")


def prepare(
    data: DataFolder,
    corpus: Path | None = None,
    questions: Path | None = None,
    *,
    embedder: Any = None,
    shards: int = 2,
    max_words: int = 40,
    held_out_every: int = HELD_OUT_EVERY,
    seed: int = 0,
) -> Split:
    """Writes the folder and returns the questions. Without `corpus` and `questions`, with the encyclopaedia of `seed`.

    `embedder` is hashed words by default. Raises CorpusError.
    """
    if corpus is None or questions is None:
        documents, asked = encyclopaedia(seed)
        ids = {document.title: document.id for document in documents}
        rows = [question.row(ids) for question in asked]
    else:
        documents, rows = read_documents(corpus), read_questions(questions)
        known = {document.id for document in documents}
        for number, row in enumerate(rows, 1):
            if missing := [document for document in row["evidence"] if document not in known]:
                raise CorpusError(f"{questions}, line {number}: its evidence {missing[:3]} is not in {corpus}")
    split = decontaminated(rows, held_out_every)
    for name, kept in (("training", split.train), ("held-out", split.held_out)):
        if not kept:
            raise CorpusError(f"there is no {name} question among {len(rows)}; mark rows with `held_out`, or add some")
    data.root.mkdir(parents=True, exist_ok=True)
    write_jsonl(data.corpus, (asdict(document) for document in documents))
    write_jsonl(data.train, split.train)
    write_jsonl(data.held_out, split.held_out)
    embedder = embedder or EMBEDDERS["words"]()
    if is_current(data.index, data.corpus, embedder, shards, max_words):
        log.info("the index in %s is up to date", data.index)
    else:
        log.info("embedding the passages of %s", data.corpus)
        build_index(data.index, data.corpus, embedder, shards, max_words)
    return split


def read_questions(path: Path) -> list[dict]:
    """Rows with `prompt`, `answers`, `evidence` (ids of documents) and, where given, `subject` and `held_out`.

    Raises CorpusError naming the line that is wrong.
    """
    rows = []
    for number, line in enumerate(lines(path), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CorpusError(f"{path}, line {number}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise CorpusError(f"{path}, line {number}: must be a JSON object")
        prompt = row.get("prompt", row.get("query"))
        answers = row.get("answers", [row["answer"]] if "answer" in row else None)
        if not (isinstance(prompt, str) and prompt.strip() and _texts(answers)):
            raise CorpusError(
                f"{path}, line {number}: needs `prompt` (or `query`), a text, and `answers`, a list of texts (or "
                f"`answer`, a text)"
            )
        documents = [document for key in _EVIDENCE_KEYS for document in row.get(key, ())]
        evidence = row.get("evidence", [document["docid"] for document in documents])
        kept = {key: row[key] for key in ("query_id", "subject", "held_out") if key in row}
        rows.append({"prompt": prompt, "answers": answers, "evidence": sorted(map(str, set(evidence))), **kept})
    if any("held_out" in row for row in rows):
        # A dataset has the same columns in each row.
        rows = [{"held_out": False, **row} for row in rows]
    return rows


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder to make")
    parser.add_argument("--corpus", type=Path, help="your own documents, a JSON object in each line")
    parser.add_argument("--questions", type=Path, help="your own questions, a JSON object in each line")
    parser.add_argument("--embedder", choices=EMBEDDERS, default="words", help="words needs no model; minilm is one")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--max-words", type=int, default=40, help="words of a passage")
    parser.add_argument("--held-out-every", type=int, default=HELD_OUT_EVERY, help="one subject in so many is held out")
    options = parser.parse_args()
    if (options.corpus is None) != (options.questions is None):
        parser.error("--corpus and --questions go together")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        split = prepare(
            DataFolder(options.data),
            options.corpus,
            options.questions,
            embedder=EMBEDDERS[options.embedder](),
            shards=options.shards,
            max_words=options.max_words,
            held_out_every=options.held_out_every,
        )
    except CorpusError as error:
        parser.exit(1, f"{error}\n")
    left_out = ", ".join(f"{count} for its {reason}" for reason, count in split.removed.items()) or "none"
    print(
        f"{options.data}: {len(split.train)} training, {len(split.held_out)} held-out questions; left out: {left_out}"
    )


if __name__ == "__main__":
    main()
