"""Documents of a corpus, and the passages that they are cut into for the index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document; what is found and shown."""

    id: str
    document: str
    title: str
    text: str


class CorpusError(ValueError):
    """A corpus that cannot be read: names the file, the line and what is wrong with it."""


def read_documents(path: Path) -> list[Document]:
    """A JSONL file with `id`, `title` and `text` in each line, or `docid`, `text` and `url`. Raises CorpusError."""
    documents: dict[str, Document] = {}
    for number, line in enumerate(lines(path), 1):
        try:
            row = json.loads(line)
            if "docid" in row:
                row = {"id": str(row["docid"]), "title": _title(row["text"]) or row.get("url"), "text": row["text"]}
            document = Document(row["id"], row["title"], row["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{path}, line {number}: needs the keys id, title and text in JSON ({error!r})"
            ) from error
        if not all(isinstance(value, str) and value.strip() for value in asdict(document).values()):
            raise CorpusError(f"{path}, line {number}: id, title and text must be text that is not empty")
        if document.id in documents:
            raise CorpusError(f"{path}, line {number}: the id {document.id!r} was there before")
        documents[document.id] = document
    if not documents:
        raise CorpusError(f"{path} holds no documents")
    return list(documents.values())


def _title(text: str) -> str | None:
    """The title that a document of BrowseComp-Plus has in the header of its text, if any."""
    found = re.match(r"---\n(?:.*\n)*?title:[ \t]*(\S.*)\n", text)
    return found[1].strip() if found else None


def lines(path: Path) -> list[str]:
    """Not `splitlines`, which also splits at marks that JSON leaves as they are."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def sentences(text: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+", text.strip()) if sentence]


def passages(document: Document, max_words: int) -> Iterator[Passage]:
    """Whole sentences, up to `max_words` words together; a sentence that is longer stands alone."""
    pieces: list[list[str]] = []
    for sentence in sentences(document.text):
        if pieces and sum(len(s.split()) for s in pieces[-1]) + len(sentence.split()) <= max_words:
            pieces[-1].append(sentence)
        else:
            pieces.append([sentence])
    for number, piece in enumerate(pieces):
        yield Passage(f"{document.id}#{number}", document.id, document.title, " ".join(piece))
