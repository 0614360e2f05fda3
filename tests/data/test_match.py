"""The default reward reads numbers exactly as they are written, and never raises or waits for any text."""

import string
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.data.match import match_answer
from megasync.data.written_number import written_number


def groups(number, separator):
    return f"{number:,}".replace(",", separator)


@given(st.integers(0, 10**12), st.sampled_from([",", " ", "\\,", "{,}", "\u202f", "'", "_", ",\\!"]))
def test_thousands_are_read_back(number, separator):
    assert written_number(groups(number, separator)).value == number


@given(st.integers(1000, 10**12), st.integers(0, 9999))
def test_decimals_are_read_back_in_american_and_in_european_notation(whole, decimals):
    value = Fraction(f"{whole}.{decimals:04d}")
    assert written_number(f"{whole:,}.{decimals:04d}").value == value
    assert written_number(f"{groups(whole, '.')},{decimals:04d}").value == value
    assert written_number(f"{whole},{decimals:04d}").value == value


@given(st.integers(0, 99), st.integers(1, 98), st.integers(1, 99))
def test_fractions_and_mixed_numbers_are_read_back(whole, top, bottom):
    assert written_number(f"{top}/{bottom}").value == written_number(f"\\frac{{{top}}}{{{bottom}}}").value
    if top < bottom:
        for text in (f"{whole} {top}/{bottom}", f"{whole}\\frac{{{top}}}{{{bottom}}}", f"{whole} and {top}/{bottom}"):
            assert written_number(text).value == whole + Fraction(top, bottom)
        assert written_number(f"-{whole} {top}/{bottom}").value == -whole - Fraction(top, bottom)


@pytest.mark.parametrize(
    "text",
    [
        "1,2,3",
        "1 2",
        "1_2",
        "1,23,4",
        "5x",
        "36\u03c0",
        "1/0",
        "10^{999999}",
        "2^(2^(2^20))",
        "7 or 8",
        "",
        "x" * 10**5,
    ],
)
def test_what_is_no_number_for_sure_is_none(text):
    assert written_number(text) is None


# Pieces that mean something to the readers, and any characters.
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "\\boxed{",
                "}",
                "{",
                "<think>",
                "</think>",
                "<answer>",
                "####",
                "The answer is",
                "\\frac",
                "^",
                "(1,",
                "x=",
                "$",
                "1,234",
                " or ",
                "e5",
                "!",
            ]
        ),
        st.text(string.printable, max_size=4),
        st.text(max_size=3),
    ),
    max_size=30,
).map("".join)


@given(TEXTS, TEXTS)
def test_any_two_texts_are_compared(response, reference):
    (score,) = match_answer([response], answer=[reference])
    assert score in ((0.0, 1.0) if reference.strip() else (None,))


@given(TEXTS)
def test_a_reference_that_is_boxed_is_right(text):
    """Whatever its characters are, unless they change what the box is."""
    plain = text.translate(str.maketrans("", "", "\\{}<>[]◁▷#|\u25c1")).strip(" \n.,;:*_`\"'")
    if any(character.isalnum() for character in plain) and "answer" not in plain.lower():
        assert match_answer([f"\\boxed{{{plain}}}"], answer=[plain]) == [1.0]


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "</think>",
        "<answer>",
        "(1,",
        "1,",
        "x=",
        "answer is ",
        "\\frac{",
        "a",
        "1",
        "\\[\n",
        "$$\n",
        "\u3001",
        "\u2234 ",
        "\u2705",
        "\u9009",
        "wait ",
        ". Or ",
        "A) 1 ",
        "boxed{",
        "[BEGIN FINAL RESPONSE]",
    ],
)
def test_a_text_that_repeats_itself_is_answered_at_once(piece):
    """A model that has collapsed writes such texts; a search that grows with their square would take minutes."""
    assert match_answer([piece * 5000], answer=["no"]) == [0.0]
