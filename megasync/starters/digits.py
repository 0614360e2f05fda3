"""The tiny model of the quickstart: a Qwen3 with random weights and one token per character of the digit tasks.

It has two KV heads, so that it shards over two tensor-parallel ranks like a large model. `digits_moe` has experts in
the place of its dense layers.
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


# Two of eight experts for each token. SGLang's Qwen3-MoE does not tie embeddings.
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def write_digits(out: Path, seed: int = SEED, experts: bool = False) -> None:
    """Writes config, random float32 weights from `seed`, and the tokenizer into `out`; with `experts` a Qwen3-MoE."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, sizes = ("qwen3_moe", SIZES | EXPERTS) if experts else ("qwen3", SIZES)
    end = len(CHARACTERS)
    config = AutoConfig.for_model(family, vocab_size=len(CHARACTERS) + 1, **sizes, eos_token_id=end, pad_token_id=end)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
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
