"""Makes a tiny randomly initialised Hugging Face model, with a byte-level tokenizer, in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Values that each family needs in addition to the common sizes.
FAMILIES = {
    "llama": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "glm4": {"head_dim": 16},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "norm_topk_prob": True},
}


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
    """A float32 `family` model, one of `FAMILIES`; `overrides` replace config values. Ids 0-2 are pad, bos, eos."""
    from transformers import AutoConfig, AutoModelForCausalLM

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
    config = AutoConfig.for_model(family, **(values | FAMILIES[family] | overrides))
    path = Path(path)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Hugging Face initialises biases to zero, which would hide a bias that is not loaded.
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
    """A byte-level tokenizer: ids 0-2 are special, 3-258 are the bytes."""
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


def make_tiny_classifier(path: str | Path, family: str = "qwen3", *, seed: int = 0, labels: int = 1) -> Path:
    """The same with a classification head of `labels` outputs instead of a language model head."""
    from transformers import AutoModelForSequenceClassification

    return _replace_head(make_tiny_model(path, family, seed=seed), AutoModelForSequenceClassification, seed, labels)


def make_tiny_value_model(path: str | Path, family: str = "qwen3", *, seed: int = 0) -> Path:
    """The same with a value head, one output per token, instead of a language model head. Writes no tokenizer."""
    from transformers import AutoModelForTokenClassification

    path = make_tiny_model(path, family, seed=seed, tokenizer=False)
    return _replace_head(path, AutoModelForTokenClassification, seed, labels=1)


def _replace_head(path: Path, kind: type, seed: int, labels: int) -> Path:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, num_labels=labels)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32)
        if getattr(model.score, "bias", None) is not None:
            torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(path)
    return path
