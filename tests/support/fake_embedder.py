"""An embedder that needs no model: texts that share words are close."""

import zlib

import numpy as np


class FakeEmbedder:
    """Counts words in `dimension` bins. Embedding a batch that contains the text `breaks_on` fails."""

    name = "fake"

    def __init__(self, dimension=64, digest="fake", breaks_on=None):
        self.dimension, self.digest, self.breaks_on = dimension, digest, breaks_on
        self.batches = []

    def encode(self, texts):
        self.batches.append(list(texts))
        if self.breaks_on in texts:
            raise ValueError(f"cannot embed {self.breaks_on!r}")
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                row[zlib.crc32(word.strip(".,:?").encode()) % self.dimension] += 1
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
