"""The digit tasks of megasync's quickstart for verl: `digits.py FOLDER` writes the model and two parquet files.

`compute_score` is the reward, named by verl's `reward.custom_reward_function`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megasync.config.schema import DatasetConfig
from megasync.data.digits import digit_reward, digit_rows
from megasync.starters.digits import SIZES, digits_tokenizer

# The prompt is the user's message, and nothing around it.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """1 for the right answer, less for a part of it. There is room for more tokens, so each response has ended."""
    return digit_reward([solution_str], answer=[ground_truth], finish_reasons=["stop"])[0]


def write_rows(path: Path, split: str, size: int) -> None:
    import pandas

    rows = digit_rows(DatasetConfig(kind="digits", source="increment", split=split, size=size, options={"length": 4}))
    pandas.DataFrame(
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(rows)
    ).to_parquet(path)


def write_model(folder: Path) -> None:
    """A Llama with random weights: of a Qwen verl expects Qwen's chat tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # Any: tokenizers declare the ids of special tokens as anything that such a token can be.
    tokenizer: Any = digits_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **SIZES,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    write_model(folder / "model")
    write_rows(folder / "train.parquet", "train", 4096)
    write_rows(folder / "test.parquet", "test", 128)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
