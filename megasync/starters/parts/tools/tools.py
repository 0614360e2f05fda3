"""The tools: plain functions. Names, types and docstrings are what the model is told of them."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtracts the second whole number from the first.

    Args:
        a: the number to subtract from
        b: the number to subtract
    """
    return a - b


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b
