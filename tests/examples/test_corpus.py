"""The fictional encyclopaedia, and corpora of one's own."""

import json
from dataclasses import asdict

import pytest
from deepresearch.corpus import encyclopaedia
from deepresearch.documents import CorpusError, Document, read_documents, write_jsonl
from deepresearch.folders import DataFolder
from deepresearch.prepare import prepare_own
from fake_embedder import FakeEmbedder


def test_pages_depend_on_the_seed_only():
    assert encyclopaedia(0) == encyclopaedia(0)
    assert encyclopaedia(0) != encyclopaedia(1)


def test_page_names_are_unique_and_pages_contain_their_answers():
    documents, questions = encyclopaedia(0)
    assert len({document.id for document in documents}) == len({document.title for document in documents}) == 320
    text = {document.title: document.text for document in documents}
    for question in questions:
        page = text[question.subject]
        assert question.subject in question.text
        assert (question.answer in page) == (question.hops == 1), question
        if question.hops == 2:
            assert any(title in page and question.answer in text[title] for title in text), question


def test_no_fact_is_both_trained_and_held_out():
    _, questions = encyclopaedia(0)
    held_out = {question.subject for question in questions if question.held_out}
    assert len(held_out) > 0
    assert not held_out & {question.subject for question in questions if not question.held_out}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", r"line 2: needs the keys"),
        ('{"id": "b", "title": "t"}', r"line 2: needs the keys.*'text'"),
        ('{"id": "b", "title": "t", "text": " "}', "line 2: .* not empty"),
        ('{"id": "a", "title": "t", "text": "x"}', "line 2: the id 'a' was there before"),
    ],
)
def test_a_corpus_that_cannot_be_read_names_the_line(tmp_path, line, why):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "a", "title": "t", "text": "x"}\n' + line)
    with pytest.raises(CorpusError, match=why):
        read_documents(path)


def test_a_custom_corpus_with_its_questions(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"id": "a", "title": "t", "text": "The sky is blue."}\n')
    questions = [{"prompt": f"q{n}", "answers": ["blue"]} for n in range(10)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    data = DataFolder(tmp_path / "data")
    prepare_own(data, FakeEmbedder(), tmp_path / "mine.jsonl", tmp_path / "asked.jsonl")
    held_out, train = (
        [json.loads(line)["prompt"] for line in path.read_text().splitlines()] for path in (data.held_out, data.train)
    )
    assert held_out == ["q0", "q5"]
    assert train == ["q1", "q2", "q3", "q4", "q6", "q7", "q8", "q9"]
    (tmp_path / "asked.jsonl").write_text('{"prompt": "q", "answers": "blue"}')
    with pytest.raises(CorpusError, match="line 1: needs `prompt`.*`answers`, a list"):
        prepare_own(data, FakeEmbedder(), tmp_path / "mine.jsonl", tmp_path / "asked.jsonl")


def test_unicode_line_separators_stay_in_the_text(tmp_path):
    documents = [Document("a", "t", "One.\u2028Two.\x85Three."), Document("b", "t", "Four.")]
    write_jsonl(tmp_path / "corpus.jsonl", map(asdict, documents))
    assert read_documents(tmp_path / "corpus.jsonl") == documents
