import math

import pytest

from megasync.errors import ParityError
from megasync.sync.publisher import compare_logprobs


def test_the_mean_absolute_difference_comes_back():
    assert compare_logprobs([[-1.0, -2.0], [-3.0]], [[-1.25, -2.0], [-2.5]], 0.25, "server") == pytest.approx(0.25)


def test_too_large_a_difference_names_the_engine_the_worst_token_and_both_numbers():
    with pytest.raises(ParityError, match=r"http://a, version 7:.*prompt 1, token 2: trainer -1.*, server -4"):
        compare_logprobs([[-1.0], [-1.0, -1.0]], [[-1.0], [-1.5, -4.0]], 0.1, "http://a, version 7")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_never_pass(bad):
    with pytest.raises(ParityError, match="token 1"):
        compare_logprobs([[-1.0, -1.0]], [[bad, -1.0]], 1e9, "server")


def test_different_lengths_and_nothing_to_compare_are_refused():
    with pytest.raises(ParityError, match="different tokens"):
        compare_logprobs([[-1.0]], [[-1.0, -1.0]], 1.0, "server")
    with pytest.raises(ParityError, match="no log-prob"):
        compare_logprobs([[]], [[]], 1.0, "server")
