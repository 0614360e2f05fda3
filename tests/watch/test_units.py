"""Numbers as people read them."""

import math

import pytest

from megasync.watch import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (2.0, "2"), (0.01234, "0.0123"), (937.4, "937"), (999.7, "1.00k"), (1020, "1.02k"), (12345, "12.3k"),
        (1e6, "1.00M"), (-1500, "-1.50k"), (1e-6, "1.0e-06"), (None, "–"), (math.nan, "–"), (math.inf, "∞"),
    ],
)  # fmt: skip
def test_a_number_has_three_significant_digits(value, text):
    assert units.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.0123, "12 ms"), (0.9996, "1 s"), (4.21, "4.2 s"), (59.4, "59 s"), (59.6, "1 min"),
        (83, "1 min 23 s"), (3600, "1 h"), (7380, "2 h 3 min"), (200_000, "2 d 7 h"), (None, "–"), (-83, "-1 min 23 s"),
    ],
)  # fmt: skip
def test_a_duration_has_at_most_two_units(seconds, text):
    assert units.duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 %"), (0.1234, "12 %"), (0.0123, "1.2 %"), (0.00123, "0.12 %")])
def test_a_share_is_in_percent(value, text):
    assert units.share(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.5, "just now"), (5, "5 s ago"), (7380, "2 h ago"), (-3, "just now")])
def test_an_age_has_one_unit(seconds, text):
    assert units.age(1000.0, 1000.0 + seconds) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12 B"), (797_696, "798 kB"), (1.2e9, "1.2 GB")])
def test_bytes_are_in_powers_of_a_thousand(value, text):
    assert units.size(value) == text
