"""Rows of a file are those that were written, and damage is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from megasync.errors import CheckpointError
from megasync.supervised.row_file import RowFile, write_rows
from megasync.supervised.rows import TokenRow


def row(ids, trained):
    return TokenRow(np.array(ids, np.int32), np.array(trained, np.bool_))


# At least one trained token, which is not the first.
ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6).map(
        lambda tokens: row([1, *(i for i, _ in tokens), 2], [False, *(t for _, t in tokens), True])
    ),
    min_size=1,
    max_size=8,
)


@given(ROWS)
def test_rows_and_their_lengths_survive(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows"
    write_rows(path, rows)
    file = RowFile(path)
    assert len(file) == len(rows) and [entry.name for entry in path.parent.iterdir()] == ["rows"]
    prompts = {}
    for number, expected in enumerate(rows):
        found = file.row(number)
        assert found.ids.tolist() == expected.ids.tolist() and found.ids.dtype == np.int32
        assert found.trained.tolist() == expected.trained.tolist() and found.trained.dtype == np.bool_
        first = expected.trained.tolist().index(True)
        assert file.prompt_tokens[number] == first and file.trained_tokens[number] == sum(expected.trained)
        # The last trained token is not fed.
        assert first + file.response_inputs[number] == max(np.flatnonzero(expected.trained))
        prompts.setdefault(tuple(expected.ids[:first].tolist()), set()).add(int(file.prompts[number]))
    assert all(len(numbers) == 1 for numbers in prompts.values())
    assert len({next(iter(numbers)) for numbers in prompts.values()}) == len(prompts)


@pytest.mark.parametrize("damage", ["missing", "cut", "other", "numbers", "tokens", "column"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, damage):
    path = tmp_path / "rows"
    if damage == "cut":
        write_rows(path, [row([1, 2], [False, True])])
        path.write_bytes(path.read_bytes()[:-3])
    elif damage in ("numbers", "tokens", "column"):
        write_rows(path, [row([1, 2], [False, True]), row([1, 2, 3], [False, True, True])])
        columns = load_file(path)
        if damage == "column":
            del columns["fed"]
        else:
            name = {"numbers": "prompts", "tokens": "ids"}[damage]
            columns[name] = columns[name][:-1]
        save_file(columns, path)
    elif damage == "other":
        path.write_bytes(b"hello, world")
    with pytest.raises(CheckpointError, match=r"rows in .*rows cannot be read.*resume the run"):
        RowFile(path)
