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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warm_start import example, train, word_tokenizer

from deepresearch.corpus import BEGINNINGS, ENDINGS, MIDDLES, SURNAME_ENDINGS, Question, encyclopaedia
from deepresearch.documents import Passage, passages
from deepresearch.embedder import HashedWords
from deepresearch.prompts import NOTHING_FOUND, refine_messages
from deepresearch.searcher import Query, Searcher
from deepresearch.sharded_index import MatrixShard, ShardedIndex

# Tokens of several words each: what stands around the agent's queries and answers.
CALL = ('<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>')
ANSWER = ("<answer>", "</answer>")
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
    from tokenizers import Regex, pre_tokenizers

    splitter = pre_tokenizers.Split(Regex(_pieces()), "isolated")
    words: dict[str, None] = dict.fromkeys((*CALL, *ANSWER, *" \n-.:,?\"'{}[]<>/_", *map(str, range(10))))
    for seed in range(12):
        documents, questions = encyclopaedia(seed)
        texts = [f" {document.title}: {document.text}" for document in documents]
        for question in questions:
            texts += [question.text, f" {question.facts[0].relation}"]
        for text in (*texts, refine_messages("", [])[0]["content"], NOTHING_FOUND):
            words |= dict.fromkeys(piece for piece, _ in splitter.pre_tokenize_str(text))
    return word_tokenizer(words, splitter)


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


# The two models


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
