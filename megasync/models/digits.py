"""The tiny model of the quickstart: a Qwen3 with random weights and one token per character of the digit tasks.

It has two KV heads, so that it shards over two tensor-parallel ranks like a large model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megasync.data.digits import CHARACTERS, END_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEED = 0
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "dtype": "float32",
}


def write_digits(out: Path, seed: int = SEED) -> None:
    """Writes config, random float32 weights from `seed`, and the tokenizer into `out`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    end = len(CHARACTERS)
    config = Qwen3Config(vocab_size=len(CHARACTERS) + 1, **SIZES, eos_token_id=end, pad_token_id=end)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(out)
    digits_tokenizer().save_pretrained(out)


def digits_tokenizer() -> PreTrainedTokenizerFast:
    """A `PreTrainedTokenizerFast` with one token per character; only the end token is special.

    Signs and the unknown token stay visible in decoded text, so a reward that reads text sees every token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, END_TOKEN: len(CHARACTERS)}, unk_token=CHARACTERS[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN)
