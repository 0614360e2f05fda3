"""The small models' tokenizer, and the conversations that they learn from. Nothing is trained."""

import pytest
from deepresearch.corpus import encyclopaedia
from deepresearch.prompts import NOTHING_FOUND
from deepresearch.scoring import exact_match, marked_answer
from deepresearch.small_models import CALL, Library, episode, example, make_tokenizer, note


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def library():
    return Library(99)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_pages_and_questions_of_any_seed_are_words_that_the_model_knows(tokenizer):
    documents, questions = encyclopaedia(123)
    for text in (*(f" {page.title}: {page.text}" for page in documents), *(question.text for question in questions)):
        tokens = ids(tokenizer, text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.unk_token_id not in tokens, text


def test_a_name_has_the_same_tokens_wherever_it_stands(tokenizer):
    for name in ("Balarith", "Nevaridan Balack", "The Ferry of Korunik"):
        tokens = ids(tokenizer, f" {name}")
        for text in (f"Who wrote {name}?", f"- {name}: A novel.", f"{CALL[0]} {name} written{CALL[1]}"):
            found = ids(tokenizer, text)
            assert any(found[at : at + len(tokens)] == tokens for at in range(len(found))), text


def test_an_episode_searches_for_each_fact_and_ends_with_the_right_answer():
    for question in encyclopaedia(7)[1]:
        messages = episode(question)
        assert [message["role"] for message in messages] == [
            "user",
            *["assistant", "tool"] * len(question.facts),
            "assistant",
        ]
        assert exact_match(marked_answer(messages[-1]["content"]), [question.answer]) == 1.0


def test_only_what_the_assistant_writes_is_learned_and_its_tokens_are_those_of_the_chat_template(tokenizer):
    messages = episode(next(question for question in encyclopaedia(7)[1] if len(question.facts) == 2))
    made = example(tokenizer, messages)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(made.ids) == rendered
    assert made.ids == ids(tokenizer, rendered)
    learned = tokenizer.decode([token for token, mine in zip(made.ids, made.learned, strict=True) if mine])
    assert learned == "".join(f"{message['content']}<end>" for message in messages if message["role"] == "assistant")


def test_a_call_is_rendered_as_it_was_written(tokenizer):
    written = f"{CALL[0]} Balarith river{CALL[1]}"
    call = {"function": {"name": "search", "arguments": {"query": " Balarith river"}}}
    as_text, as_call = (
        tokenizer.apply_chat_template([{"role": "assistant", **message}], tokenize=False)
        for message in ({"content": written}, {"content": "", "tool_calls": [call]})
    )
    assert as_text == as_call


def test_the_refiner_learns_from_what_searches_find(library):
    facts = {note(fact) for question in library.questions for fact in question.facts}
    conversations = list(library.refinements())
    assert len(conversations) == len(facts)
    told = [messages[-1]["content"] for messages in conversations]
    assert {text for text in told if text != NOTHING_FOUND} <= facts
    assert told.count(NOTHING_FOUND) < len(told) / 20, "the retriever finds the page that a query names"
