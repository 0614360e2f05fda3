"""A few words in the form of NLTK's data, which word games read, so that they run without a download."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ("apple", "bread", "chair", "house", "money", "paper", "plant", "river", "stone", "table", "train", "water")
_TAGGER = "averaged_perceptron_tagger_eng"


def write_nltk_words(folder: Path) -> Path:
    """Writes a corpus of words, and a tagger that takes each of them for a noun. Returns the folder for NLTK_DATA."""
    corpus, tagger = folder / "corpora" / "words", folder / "taggers" / _TAGGER
    corpus.mkdir(parents=True)
    tagger.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("\n".join(WORDS))
    (corpus / "README").write_text("")
    for name, value in {"weights": {}, "tagdict": dict.fromkeys((*WORDS, "test"), "NN"), "classes": ["NN"]}.items():
        (tagger / f"{_TAGGER}.{name}.json").write_text(json.dumps(value))
    return folder
