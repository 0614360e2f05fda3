import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.trajectory.runs import Runs, float_array, int_array

NUMBERS = st.lists(st.integers(0, 3), max_size=20)


@given(NUMBERS, st.integers(-22, 22), st.integers(-22, 22))
def test_runs_behave_as_the_list_they_are_made_of(numbers, start, stop):
    runs = Runs.of(numbers)
    assert runs == numbers and list(runs) == numbers and len(runs) == len(numbers)
    assert [runs[at] for at in range(-len(numbers), len(numbers))] == numbers * 2
    assert runs[start:stop] == Runs.of(numbers[start:stop]) and runs[::-1] == numbers[::-1]
    assert pickle.loads(pickle.dumps(runs)) == runs
    assert not numbers or (runs != numbers[1:] and runs != Runs.of([*numbers, 7]))


@given(st.lists(NUMBERS, max_size=5))
def test_joined_runs_are_the_runs_of_the_joined_lists(parts):
    joined = Runs.join(map(Runs.of, parts))
    assert joined == Runs.of([number for part in parts for number in part])


@given(NUMBERS)
def test_neighbouring_runs_differ_and_none_is_empty(numbers):
    runs = Runs.of(numbers)
    assert np.all(runs.values[1:] != runs.values[:-1]) and np.all(np.diff(runs.ends, prepend=0) > 0)


def test_an_index_outside_of_the_runs_is_an_error():
    with pytest.raises(IndexError, match="position 3 of 3"):
        Runs.fill(1, 3)[3]


@pytest.mark.parametrize(
    "numbers", [[1, 2], (1, 2), range(1, 3), bytes([1, 2]), np.array([1, 2]), torch.tensor([1, 2]), Runs.of([1, 2])]
)
def test_every_kind_of_sequence_of_integers_becomes_a_read_only_array(numbers):
    array = int_array(numbers)
    assert array.dtype == np.int32 and array.tolist() == [1, 2] and not array.flags.writeable
    assert int_array(array) is array


@pytest.mark.parametrize(
    "wrong", [[1.5], ["a"], [[1]], None, [None], [1, None], 3, "12", np.array([[1]]), np.array([1.0])]
)
def test_other_values_than_integers_are_refused(wrong):
    with pytest.raises(ValueError, match="is not a sequence of integers"):
        int_array(wrong)


@pytest.mark.parametrize("wrong", [[1, 2**31], [1, -(10**30)], np.array([1, 2**40]), torch.tensor([1, -(2**31) - 1])])
def test_an_integer_beyond_32_bits_is_named(wrong):
    with pytest.raises(ValueError, match=rf"^{int(wrong[1])} at position 1 does not fit into 32 bits$"):
        int_array(wrong)


def test_floats_become_float32_and_keep_what_is_not_finite():
    array = float_array([1, 0.1, float("nan"), -1e300])
    assert array.dtype == np.float32 and array[1] == np.float32(0.1)
    assert np.isnan(array[2]) and array[3] == -np.inf
    with pytest.raises(ValueError, match="is not a sequence of numbers"):
        float_array(["0.1"])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3))))
def test_runs_of_spans_are_the_numbers_that_the_spans_stand_for(spans):
    runs = Runs.of_spans(spans)
    assert runs == Runs.of([value for value, count in spans for _ in range(count)])
    assert Runs.of_spans(runs.spans()) == runs
    assert all(count > 0 for _, count in runs.spans())
