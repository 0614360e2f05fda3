"""Two small models for a CPU, made and trained here: the search agent before reinforcement learning, and its refiner.

    python -m deepresearch.small_models --out models/deepresearch

Both are Qwen3s of half a million weights with a vocabulary of words and syllables. They are trained by plain supervised
learning, in one process, on encyclopaedias of other seeds: all names in them are others than in the corpus that the
agent is trained on. The agent's training ends early: it knows the form of a search and of an answer, and copies names
badly. The refiner's ends when it has learned to write the fact that a query asks for.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepresearch.corpus import BEGINNINGS, ENDINGS, MIDDLES, SURNAME_ENDINGS, Question, encyclopaedia
from deepresearch.documents import Passage, passages
from deepresearch.embedder import HashedWords
from deepresearch.prompts import NOTHING_FOUND, refine_messages
from deepresearch.searcher import Query, Searcher
from deepresearch.sharded_index import MatrixShard, ShardedIndex

# Tokens of several words each: what stands around the agent's queries and answers.
CALL = ('<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>')
ANSWER = ("<answer>", "</answer>")
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
# Encyclopaedias of these seeds are for supervised training; the corpus of the run has seed 0.
SEEDS = range(1, 41)
MAX_WORDS, TOP_K = 40, 2


# Tokenizer


def _pieces() -> str:
    """A regular expression that cuts text into tokens. A name is cut into syllables, wherever it stands."""
    begin, middle = "|".join(BEGINNINGS), "|".join(sorted(MIDDLES, key=len, reverse=True))
    end = "|".join([*(ending for kind in ENDINGS.values() for ending in kind), *SURNAME_ENDINGS])
    rest = rf"(?:{end})(?![a-z])"
    return "|".join(
        [
            *map(re.escape, (*CALL, *ANSWER)),
            rf" ?(?:{begin})(?=(?:{middle}){rest})",
            rf"(?:{middle})(?={rest})",
            rf"(?<=[a-z]){rest}",
            " ?[A-Za-z]+",
            " ?[0-9]",
            r"[\s\S]",
        ]
    )


def make_tokenizer() -> Any:
    """A Hugging Face tokenizer with a token for each word and syllable of the encyclopaedia's pages and questions."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    splitter = pre_tokenizers.Split(Regex(_pieces()), "isolated")
    words: dict[str, None] = dict.fromkeys((*CALL, *ANSWER, *" \n-.:,?\"'{}[]<>/_", *map(str, range(10))))
    for seed in range(12):
        documents, questions = encyclopaedia(seed)
        texts = [f" {document.title}: {document.text}" for document in documents]
        for question in questions:
            texts += [question.text, f" {question.facts[0].relation}"]
        for text in (*texts, refine_messages("", [])[0]["content"], NOTHING_FOUND):
            words |= dict.fromkeys(piece for piece, _ in splitter.pre_tokenize_str(text))
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


# Demonstrations


def note(question_fact: tuple[str, str, str]) -> str:
    """The line that the refiner writes of a fact."""
    title, relation, value = question_fact
    return f" {title}: {relation} {value}"


def episode(question: Question) -> list[dict[str, Any]]:
    """A conversation that answers the question: a search for each fact, then the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    for fact in question.facts:
        call = f"{CALL[0]} {fact.title} {fact.relation}{CALL[1]}"
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": note(fact)}]
    return [*messages, {"role": "assistant", "content": f"{ANSWER[0]} {question.answer}{ANSWER[1]}"}]


class Library:
    """The encyclopaedia of a seed with its index."""

    def __init__(self, seed: int) -> None:
        documents, self.questions = encyclopaedia(seed)
        pieces = [piece for document in documents for piece in passages(document, MAX_WORDS)]
        embedder = HashedWords()
        vectors = embedder.encode([f"{piece.title}. {piece.text}" for piece in pieces])
        self.search = Searcher(embedder, ShardedIndex([MatrixShard(vectors, 0)]), pieces)

    def refinements(self) -> Iterator[list[dict[str, Any]]]:
        """Conversations of the refiner: what a search found, and the fact that the query asks for."""
        facts = list(dict.fromkeys(fact for question in self.questions for fact in question.facts))
        queries = [Query(f"{fact.title} {fact.relation}", TOP_K) for fact in facts]
        for fact, query, hits in zip(facts, queries, self.search(queries), strict=True):
            found = [hit.passage for hit in hits]
            told = any(piece.title == fact.title and fact.value in piece.text for piece in found)
            request = refine_messages(query.text, [_as_found(piece) for piece in found])
            yield [*request, {"role": "assistant", "content": note(fact) if told else NOTHING_FOUND}]


def _as_found(piece: Passage) -> dict[str, str]:
    return {"title": piece.title, "text": piece.text}


# Supervised training


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


def make(out: Path, demonstrations: int = 80, agent_steps: int = 160, refiner_steps: int = 1200) -> None:
    """Writes the models `agent` and `refiner`. The agent sees that many solved questions, again and again."""
    tokenizer = make_tokenizer()
    libraries = [Library(seed) for seed in SEEDS]
    questions = [question for library in libraries for question in library.questions]
    random.Random(0).shuffle(questions)
    shown = [example(tokenizer, episode(question)) for question in questions[:demonstrations]]
    notes = [example(tokenizer, messages) for library in libraries for messages in library.refinements()]
    for seed, (name, examples, steps) in enumerate((("agent", shown, agent_steps), ("refiner", notes, refiner_steps))):
        if steps:
            print(f"training {name} on {len(examples)} conversations", flush=True)
            train(tokenizer, examples, steps, batch=32, lr=2e-3, seed=seed).save_pretrained(out / name)
            tokenizer.save_pretrained(out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/deepresearch"))
    parser.add_argument("--demonstrations", type=int, default=80, help="solved questions that the agent learns from")
    parser.add_argument("--agent-steps", type=int, default=160)
    parser.add_argument("--refiner-steps", type=int, default=1200)
    options = parser.parse_args()
    make(options.out, options.demonstrations, options.agent_steps, options.refiner_steps)


if __name__ == "__main__":
    main()
