"""Small Qwen3s for the examples: a vocabulary of words, and a warm start by supervised learning in one process.

A model of half a million weights learns in minutes on a CPU what a large one brings along: the form of a call, of an
answer or of a program. What it does with them is left to reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL = ["<unknown>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}"
    "<tool_call>{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] | tojson }}}"
    "</tool_call>{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "dtype": "float32",
}


def word_tokenizer(words: Iterable[str], splitter: Any) -> Any:
    """A Hugging Face tokenizer with a token for each of `words`, into which `splitter` cuts any text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL[0],
        eos_token="<end>",
        pad_token="<end>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE,
    )


@dataclass(slots=True)
class Example:
    """Token ids, and for each whether it is learned."""

    ids: list[int]
    learned: list[bool]


def example(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> Example:
    """The tokens of a conversation; those that an assistant writes are learned."""
    ids: list[int] = []
    learned: list[bool] = []
    for number, message in enumerate(messages):
        answers = message["role"] == "assistant"
        head = f"<{message['role']}>"
        for text, mine in ((head, False), (f"{message['content']}<end>", answers)):
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += piece
            learned += [mine] * len(piece)
        assert number or not answers
    return Example(ids, learned)


def train(tokenizer: Any, examples: Sequence[Example], steps: int, batch: int, lr: float, seed: int) -> Any:
    """A Qwen3 from random weights, trained with AdamW to predict the learned tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # Layers of this size gain nothing from a second thread, and on a busy machine the first one waits for it.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    config = Qwen3Config(vocab_size=len(tokenizer), **SIZES, eos_token_id=end, pad_token_id=end)
    model = Qwen3ForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps + 1, pct_start=0.1)
    chance = random.Random(seed)
    for step in range(1, steps + 1):
        drawn = [examples[chance.randrange(len(examples))] for _ in range(batch)]
        width = max(len(each.ids) for each in drawn)
        ids = torch.tensor([each.ids + [end] * (width - len(each.ids)) for each in drawn])
        learned = torch.tensor([each.learned + [False] * (width - len(each.ids)) for each in drawn])
        logits = model(ids).logits[:, :-1][learned[:, 1:]]
        targets = ids[:, 1:][learned[:, 1:]]
        loss = torch.nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            right = (logits.argmax(-1) == targets).float().mean()
            print(f"step {step}: loss {loss.item():.3f}, tokens right {right.item():.1%}", flush=True)
    return model.eval()


def split_words(pieces: str, conversations: Sequence[Sequence[dict[str, Any]]]) -> Any:
    """The tokenizer of all words of the conversations; `pieces` is the regular expression that cuts text into them."""
    from tokenizers import Regex, pre_tokenizers

    splitter = pre_tokenizers.Split(Regex(pieces), "isolated")
    texts = (message["content"] for messages in conversations for message in messages)
    words = dict.fromkeys(piece for text in texts for piece, _ in splitter.pre_tokenize_str(text))
    return word_tokenizer(words, splitter)


def make_model(
    out: Path, pieces: str, conversations: Sequence[Sequence[dict[str, Any]]], shown: int, steps: int
) -> None:
    """Writes a model that knows the words of all conversations and has learned from the first `shown` of them."""
    tokenizer = split_words(pieces, conversations)
    examples = [example(tokenizer, messages) for messages in conversations[:shown]]
    print(f"warming up {out} on {shown} conversations", flush=True)
    train(tokenizer, examples, steps, batch=32, lr=2e-3, seed=0).save_pretrained(out)
    tokenizer.save_pretrained(out)
