"""Where the files of the example lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DataFolder:
    """The folder that `prepare.py` makes: the corpus, its index, and the questions."""

    root: Path

    @classmethod
    def at(cls, path: str | Path) -> DataFolder:
        return cls(Path(path))

    @property
    def corpus(self) -> Path:
        return self.root / "corpus.jsonl"

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def train(self) -> Path:
        return self.root / "train.jsonl"

    @property
    def held_out(self) -> Path:
        return self.root / "held_out.jsonl"
