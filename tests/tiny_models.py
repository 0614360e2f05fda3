"""Makes a tiny randomly initialised Hugging Face model, with a byte-level tokenizer, in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def make_tiny_model(
    path: str | Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    tied: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    tokenizer: bool = True,
    **overrides,
) -> Path:
    """A float32 `family` (qwen2, qwen3 or llama) model; `overrides` replace config values. Ids 0-2 are pad, bos, eos."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    classes = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = classes[family]
    values = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # Larger than the usual 0.02, so that the logits of a random model are far from uniform.
        "initializer_range": 0.2,
    }
    if family != "qwen2":
        values["head_dim"] = 16
    config = config_class(**(values | overrides))
    path = Path(path)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = model_class(config).to(torch.float32)
        if family == "qwen2":
            # Hugging Face starts biases at zero, which would hide a bias that is not loaded.
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    torch.nn.init.normal_(parameter, std=0.2)
    finally:
        torch.set_rng_state(generator_state)
    model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer(chat_template).save_pretrained(path)
    return path


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE):
    """Ids 0-2 are special, 3-258 are the bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=chat_template,
    )
