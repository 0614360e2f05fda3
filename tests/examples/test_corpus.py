"""The fictional encyclopaedia, and corpora of one's own."""

import json
from dataclasses import asdict
from itertools import pairwise

import pytest
from deepresearch.corpus import encyclopaedia
from deepresearch.documents import CorpusError, Document, read_documents, write_jsonl
from deepresearch.folders import DataFolder
from deepresearch.prepare import prepare
from fake_embedder import FakeEmbedder


def test_pages_depend_on_the_seed_only():
    assert encyclopaedia(0) == encyclopaedia(0)
    assert encyclopaedia(0) != encyclopaedia(1)


def test_page_names_are_unique_and_each_fact_stands_on_its_page():
    documents, questions = encyclopaedia(0)
    assert len({document.id for document in documents}) == len({document.title for document in documents}) == 320
    text = {document.title: document.text for document in documents}
    for question in questions:
        assert question.subject in question.text
        assert question.answer not in question.text
        for fact in question.facts:
            assert fact.value in text[fact.title]
        for fact, further in pairwise(question.facts):
            assert further.title == fact.value


def test_relations_are_words_of_the_page():
    documents, questions = encyclopaedia(0)
    text = {document.title: document.text for document in documents}
    assert all(f" {fact.relation} " in text[fact.title] for question in questions for fact in question.facts)


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


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_in_the_form_of_browsecomp_plus(tmp_path):
    """Held-out questions are marked; the training question that needs a document of one of them is left out."""
    corpus = write(
        tmp_path / "corpus.jsonl",
        [
            {"docid": "7", "text": "---\ntitle: The sky\ndate: 2020\n---\nThe sky is blue.", "url": "http://sky"},
            {"docid": 8, "text": "Grass is green.", "url": "http://grass"},
            {"docid": "9", "text": "Snow is white.", "url": "http://snow"},
        ],
    )
    sky, grass, snow = ({"docid": number, "text": "..."} for number in ("7", "8", "9"))
    asked = write(
        tmp_path / "asked.jsonl",
        [
            {"query_id": "1", "query": "Sky?", "answer": "blue", "gold_docs": [sky], "held_out": True},
            {
                "query_id": "2",
                "query": "Grass?",
                "answer": "green",
                "gold_docs": [grass],
                "evidence_docs": [snow, grass],
            },
            {"query_id": "3", "query": "Above?", "answer": "sky", "gold_docs": [], "evidence_docs": [sky]},
        ],
    )
    data = DataFolder(tmp_path / "data")
    split = prepare(data, corpus, asked, embedder=FakeEmbedder())
    assert split.removed == {"evidence": 1}
    assert read(data.held_out) == [
        {"held_out": True, "prompt": "Sky?", "answers": ["blue"], "evidence": ["7"], "query_id": "1"}
    ]
    assert read(data.train) == [
        {"held_out": False, "prompt": "Grass?", "answers": ["green"], "evidence": ["8", "9"], "query_id": "2"}
    ]
    assert [(page.id, page.title) for page in read_documents(data.corpus)] == [
        ("7", "The sky"),
        ("8", "http://grass"),
        ("9", "http://snow"),
    ]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "q", "answers": "blue"}, "line 1: needs `prompt`.*`answers`, a list"),
        ({"prompt": " ", "answers": ["blue"]}, "line 1: needs `prompt`"),
        ({"prompt": "q", "answers": ["blue"], "evidence": ["x"]}, r"line 1: its evidence \['x'\] is not in .*corpus"),
        ({"prompt": "q", "answers": ["blue"], "held_out": True}, "no training question among 1"),
    ],
)
def test_questions_that_cannot_be_used_name_the_line(tmp_path, row, why):
    corpus = write(tmp_path / "corpus.jsonl", [{"id": "a", "title": "t", "text": "The sky is blue."}])
    with pytest.raises(CorpusError, match=why):
        prepare(DataFolder(tmp_path / "data"), corpus, write(tmp_path / "asked.jsonl", [row]), embedder=FakeEmbedder())


def test_unicode_line_separators_stay_in_the_text(tmp_path):
    documents = [Document("a", "t", "One.\u2028Two.\x85Three."), Document("b", "t", "Four.")]
    write_jsonl(tmp_path / "corpus.jsonl", map(asdict, documents))
    assert read_documents(tmp_path / "corpus.jsonl") == documents
