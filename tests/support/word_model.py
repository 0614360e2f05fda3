"""A tiny model with random weights whose tokens are whole texts, such as tool calls, so it writes them by chance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tiny_models import make_tiny_model

# Like SmolLM2's template, it renders neither tools nor calls.
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<unknown>", "<eos>"]


def make_word_model(path: Path, words: Sequence[str]) -> Path:
    """Any text outside `words` is one unknown token up to the next `<`. The logits of all tokens are nearly equal."""
    size = len(SPECIAL) + len(words)
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    make_tiny_model(path, vocab_size=size, tokenizer=False, tied=True, initializer_range=0.01, **ends)
    word_tokenizer(words).save_pretrained(path)
    return path


def word_tokenizer(words: Sequence[str]):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    pieces = "|".join([*(re.escape(word) for word in words), "<[^<]*", "[^<]+"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=SPECIAL[0], eos_token="<eos>", pad_token="<eos>", chat_template=TEMPLATE
    )
