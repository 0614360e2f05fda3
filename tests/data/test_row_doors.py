"""Whatever a file, a Python caller or a template contains, rows are usable or a DataError says which row is not."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from megasync.config.schema import DataConfig, DatasetConfig, PromptConfig
from megasync.data import as_rows, load_dataset
from megasync.data.datasets import load_conversations
from megasync.data.prompts import PromptSource, Renderer
from megasync.data.rows import fill
from megasync.errors import DataError

TOKENIZER = byte_tokenizer()
GOOD = b'{"prompt": "a", "answer": "1", "x": [1, {"y": null}]}'


def prepare(rows, data):
    """What a run does with rows before anything starts."""
    return PromptSource(rows, Renderer(TOKENIZER, data.prompt, 300), shuffle=True, seed=0)


def load(path, data):
    return prepare(load_dataset(DatasetConfig("jsonl", str(path)), data)[0], data)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "caf\\ud83d"}', "column 'prompt' has half of a surrogate pair"),
        (b'{"prompt": "a", "\\ude00": 1}', "the name of the column .* has half of a surrogate pair"),
        (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "JSON that Python does not read .*4300 digits"),
        (
            b'{"prompt": "a", "answer": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
            "JSON that Python does not read .*recursion",
        ),
        (b'{"prompt": "a", "answer": ' + b"[" * 200 + b"]" * 200 + b"}", "column 'answer' is nested deeper than 100"),
        (b'{"prompt": "caf\xe9"}', "is not UTF-8 text"),
        (b'{"prompt": "a"', "not valid JSON"),
        (b'\x00{"prompt": "a"}', "not valid JSON"),
        ('{"prompt": "a"}'.encode("utf-16"), "is not UTF-8 text"),
        (b'{"prompt": NaN}', "the prompt must be text"),
        (b'{"prompt": "a", "prompt_ids": 1}', "reserved"),
        (b'"prompt"', "must be a JSON object"),
        (b"{}", "has no .prompt. column"),
    ],
    ids=range(13),
)
def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path, line, message):
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"train\.jsonl:3:? .*{message}|train\.jsonl:3:? {message}"):
        load(path, DataConfig())
    with pytest.raises(DataError, match=r"train\.jsonl:3"):
        load_conversations(DatasetConfig("jsonl", str(path)))


@pytest.mark.parametrize(
    ("template", "value", "message"),
    [
        ("{prompt} {x:.2f}", None, "not a valid format string for prompt='a', x=None: .*NoneType"),
        ("{prompt} {x:d}", "1", "not a valid format string for prompt='a', x='1': "),
        ("{prompt} {x:c}", 10**9, "not a valid format string"),
        ("{prompt} {x[0]}", None, "not a valid format string"),
        ("{prompt} {x.y}", None, "not a valid format string"),
        ("{prompt} {x!z}", None, "not a valid format string"),
        ("{prompt} {", None, "not a valid format string"),
        ("{prompt} {}", None, "not a valid format string"),
        ("{prompt} {x[a]}", {"b": 1}, "not a valid format string"),
        ("{prompt} {z}", None, "names the column 'z', which a row lacks"),
        ("{z}", None, "names the column 'z', which a row lacks"),
    ],
)
def test_a_template_that_a_row_does_not_fit_is_refused_with_key_and_row(template, value, message):
    data = DataConfig(prompt=PromptConfig(template=template))
    rows = as_rows([{"prompt": "a", "x": value}], "mine", data)
    with pytest.raises(DataError, match=rf"mine, row 0: data\.prompt\.template=.*{message}"):
        prepare(rows, data)


def test_a_value_whose_format_raises_anything_is_refused():
    class Odd:
        def __format__(self, form):
            raise RecursionError("deep")

    with pytest.raises(DataError, match="key='{x}' is not a valid format string for x=.*: deep"):
        fill("key", "{x}", {"x": Odd()})


@pytest.mark.parametrize("source", ["a\0b", "~nobody/x", "."])
def test_a_source_that_is_no_file_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data\.\*\.source|holds nothing"):
        load_dataset(DatasetConfig("jsonl", source, split="**/["))


def test_a_parquet_row_that_python_cannot_hold_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    times = pyarrow.array([0, 2**62], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "at": times}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet cannot be read as parquet, row 1: "):
        load_dataset(DatasetConfig("parquet", str(tmp_path)))


# JSON with what parsers stumble over, as text.
ODD = st.sampled_from(
    [
        *("null", "NaN", "-Infinity", "1e999", "9" * 4300, "9" * 4301, "1" + "0" * 999, "true", '""', "[]", "{}"),
        *(r'"\ud83d"', r'"\ud83d\ude00"', r'"\u0000"', '"\\u2028"', '"<|im_end|>"', '"{prompt}"', "0x1", "'a'", '"\t"'),
        *(
            "[" * 50 + "]" * 50,
            "[" * 990 + "]" * 990,
            '{"a":' * 150 + "1" + "}" * 150,
            '[{"role": "user", "content": null}]',
        ),
    ]
)
COLUMN = st.sampled_from(["prompt", "answer", "messages", "x", "completions", "", r"\ud800", "a.b", "where"])
LINES = st.lists(st.tuples(COLUMN, ODD | st.text(max_size=5).map(json.dumps)), max_size=4).map(
    lambda pairs: ("{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}").encode()
)
TEMPLATES = st.sampled_from(
    [
        "{prompt}",
        "{x}",
        "{prompt} {x:.2f}",
        "{answer:>5}",
        "{x[0]}",
        "{x.__class__}",
        "{",
        "{}",
        "{0}",
        "{x!r:^9}",
        "{x:{answer}}",
    ]
)


@st.composite
def files(draw):
    """A good file after a few mutations: other lines, and changed, missing and added bytes."""
    lines = draw(st.lists(st.just(GOOD) | LINES, min_size=1, max_size=4))
    content = bytearray(b"\n".join(lines))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(content)))
        kept = draw(st.integers(0, 3))
        content[at : at + kept] = draw(
            st.binary(max_size=3) | st.sampled_from([b"\n", b"\r", b"\xef\xbb\xbf", b"\\ud8", b'"'])
        )
    return bytes(content)


def check_file(path, content, template, columns):
    path.write_bytes(content)
    data = DataConfig(prompt=PromptConfig(template=template, max_tokens=10**6), columns=columns)
    try:
        source = load(path, data)
    except DataError as error:
        assert "train.jsonl" in str(error)
    else:
        assert source.next().prompt_ids


COLUMNS = st.sampled_from([{}, {"prompt": "x"}, {"prompt": "x.y", "answer": "prompt"}, {"messages": "prompt"}])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=4)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["prompt", "answer", "x", "messages"]) | st.integers(), VALUES, max_size=4)
    | VALUES,
    max_size=3,
)


def check_rows(rows, template):
    data = DataConfig(prompt=PromptConfig(template=template, max_tokens=10**6))
    try:
        source = prepare(as_rows(rows, "mine", data), data)
    except DataError as error:
        assert "mine" in str(error)
    else:
        assert len(source) == len(rows)


@given(files(), TEMPLATES, COLUMNS)
@settings(max_examples=150, derandomize=True)
def test_mutated_files_are_read_or_refused_by_name(tmp_path_factory, content, template, columns):
    check_file(tmp_path_factory.getbasetemp() / "train.jsonl", content, template, columns)


@given(ROWS, TEMPLATES)
@settings(max_examples=150, derandomize=True)
def test_any_python_rows_are_read_or_refused_by_name(rows, template):
    check_rows(rows, template)


@pytest.mark.soak
@given(files(), TEMPLATES, COLUMNS)
@settings(max_examples=3_000)
def test_many_mutated_files_are_read_or_refused_by_name(tmp_path_factory, content, template, columns):
    check_file(tmp_path_factory.getbasetemp() / "train.jsonl", content, template, columns)


@pytest.mark.soak
@given(ROWS, TEMPLATES)
@settings(max_examples=3_000)
def test_many_python_rows_are_read_or_refused_by_name(rows, template):
    check_rows(rows, template)
