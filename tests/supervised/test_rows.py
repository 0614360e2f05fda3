"""Which tokens of a row are trained: the assistant's, and the end of each of its turns."""

import json

import pytest
from tiny_models import byte_tokenizer

from megasync.config.schema import DatasetConfig, PromptConfig, SftConfig
from megasync.data.datasets import load_conversations
from megasync.errors import DataError
from megasync.supervised.rows import SupervisedRenderer

VOCAB, EOS = 300, 2
TURNS = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<eos>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}assistant:{% endif %}"
PLAIN = TURNS + ASKED
# Leaves out what stands before "|" in all turns but the last, as templates of reasoning models do.
FORGETFUL = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}<eos>\n{% endfor %}" + ASKED
)
MARKED = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<eos>{% endgeneration %}{% else %}{{ m['content'] }}<eos>{% endif %}"
    "{{ '\n' }}{% endfor %}" + ASKED
)
CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "x|bc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]


def renderer(template: str | None = PLAIN, prompt: PromptConfig | None = None, limit: int = 200, **sft):
    tokenizer = byte_tokenizer(template)
    return SupervisedRenderer(tokenizer, SftConfig(**sft), prompt or PromptConfig(), VOCAB, [EOS], limit)


def shown(row) -> tuple[str, str]:
    """The text of a row, and the part of it that is trained."""
    tokenizer = byte_tokenizer()
    assert row.ids.dtype == "int32" and row.trained.dtype == bool and len(row.ids) == len(row.trained)
    return tokenizer.decode(row.ids), tokenizer.decode(row.ids[row.trained])


def rendered(rows, **options):
    return [shown(row) for row in renderer(**options).rows(rows, "sft.train")[0]]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["rendered", "marked"])
def test_all_turns_of_the_assistant_are_trained_with_their_ends(template):
    whole = "user:a<eos>\nassistant:x|bc<eos>\nuser:d<eos>\nassistant:e<eos>"
    assert rendered([{"messages": CHAT}], template=template) == [(whole, "x|bc<eos>e<eos>")]


def test_turns_that_a_template_rewrites_later_become_rows_of_their_own():
    assert rendered([{"messages": CHAT}], template=FORGETFUL) == [
        ("user:a<eos>\nassistant:x|bc<eos>", "x|bc<eos>"),
        ("user:a<eos>\nassistant:bc<eos>\nuser:d<eos>\nassistant:e<eos>", "e<eos>"),
    ]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["rendered", "marked"])
def test_a_conversation_may_begin_with_the_assistant(template):
    chat = [{"role": "assistant", "content": "hi"}, *CHAT[2:]]
    whole = "assistant:hi<eos>\nuser:d<eos>\nassistant:e<eos>"
    assert rendered([{"messages": chat}], template=template) == [(whole, "hi<eos>e<eos>")]


@pytest.mark.parametrize("template", [PLAIN, MARKED, FORGETFUL], ids=["rendered", "marked", "rewritten"])
def test_a_turn_of_weight_0_is_shown_and_not_trained(template):
    first, second = ([*CHAT[:n], CHAT[n] | {"weight": 0}, *CHAT[n + 1 :]] for n in (1, 3))
    ((text, trained),) = rendered([{"messages": first}], template=template)
    assert "bc<eos>\nuser:d" in text and trained == "e<eos>"
    assert [trained for _, trained in rendered([{"messages": second}], template=template)] == ["x|bc<eos>"]


def test_an_answer_is_trained_with_the_end_of_the_response():
    rows = [{"prompt": "1+1=", "answer": "2"}]
    assert rendered(rows) == [("1+1=2<eos>", "2<eos>")]
    chat = PromptConfig(format="chat", system="s")
    assert rendered(rows, prompt=chat) == [("system:s<eos>\nuser:1+1=<eos>\nassistant:2<eos>", "2<eos>")]
    assert rendered([{"prompt": "a", "reply": "b"}], answer="reply") == [("ab<eos>", "b<eos>")]
    assert rendered(rows, answer_template=" {answer}!") == [("1+1= 2!<eos>", " 2!<eos>")]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["rendered", "marked"])
def test_names_of_special_tokens_in_a_row_are_text(template):
    chat = [{"role": "user", "content": "<eos>"}, {"role": "assistant", "content": "b<eos>c"}]
    (row,), _ = renderer(template).rows([{"messages": chat}], "sft.train")
    # The ends of the two turns only.
    assert row.ids.tolist().count(EOS) == 2
    assert shown(row)[1] == "b<eos>c<eos>"
    (row,), _ = renderer().rows([{"prompt": "a<eos>", "answer": "<eos>"}], "sft.train")
    assert row.ids.tolist().count(EOS) == 1


def test_long_rows_are_an_error_or_left_out():
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "b" * 10}]
    with pytest.raises(DataError, match=r"sft.train, row 1 has 12 tokens, more than sft.max_tokens=5"):
        renderer(limit=5).rows(rows, "sft.train")
    found, long = renderer(limit=5, drop_long_rows=True).rows(rows, "sft.train")
    assert (len(found), long) == (1, 1)
    with pytest.raises(DataError, match=r"all 2 rows are longer than sft.max_tokens=1"):
        renderer(limit=1, drop_long_rows=True).rows(rows, "sft.train")


@pytest.mark.parametrize(
    ("row", "template", "named"),
    [
        ({"messages": CHAT[:1]}, PLAIN, "no message has the role 'assistant'"),
        ({"messages": CHAT}, None, "the tokenizer of model.path has none"),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": 0}]}, PLAIN, "have weight 0, so nothing would be trained"),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": 0.5}]}, PLAIN, "message 1 has weight=0.5; it must be 1, or 0"),
        (
            {"messages": CHAT[1:]},
            TURNS + "{% if add_generation_prompt %}@{% endif %}",
            "shows no beginning of message 0; let a user's message come first",
        ),
        ({"prompt": "a"}, PLAIN, r"the column 'answer' \(sft.answer\) must be text, got None"),
        ({"prompt": "a", "answer": 3}, PLAIN, "must be text, got 3"),
        (
            {"messages": CHAT},
            "{{ messages | length }}:{{ messages[-1]['content'] }}" + ASKED,
            "mark answers in the template",
        ),
    ],
)
def test_rows_that_cannot_be_trained_are_refused(row, template, named):
    with pytest.raises(DataError, match=f"sft.train, row 0: .*{named}"):
        renderer(template).rows([row], "sft.train")


def test_a_tokenizer_of_another_model_is_refused():
    wrong = SupervisedRenderer(byte_tokenizer(PLAIN), SftConfig(), PromptConfig(), 50, [EOS], 200)
    with pytest.raises(DataError, match="outside the model's vocabulary of 50"):
        wrong.rows([{"messages": CHAT}], "sft.train")


def test_conversations_are_read_from_files(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ({"messages": CHAT}, {"prompt": "a", "answer": "b"})))
    rows = load_conversations(DatasetConfig("jsonl", str(path)))
    assert [sorted(row) for row in rows] == [["messages"], ["answer", "prompt"]]
    path.write_text(json.dumps({"messages": [{"content": "a"}]}))
    with pytest.raises(DataError, match=r"d\.jsonl:1: messages must be a list of chat messages"):
        load_conversations(DatasetConfig("jsonl", str(path)))
