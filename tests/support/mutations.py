"""Structured mutations: a sound document of which one part is odd, missing, repeated, wrapped or somewhere else.

    try_mutations(read, SOUND, seeds, DataError)        JSON, YAML and TOML, as plain data
    try_mutations(read, b"...", seeds, DataError)       bytes

Every change follows from its seed, which a failure names.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

ODD = (
    *(None, True, False, 0, -1, 3, 1.5, 1e308, 10**30, float("nan"), float("inf"), json.loads("[" * 90 + "]" * 90)),
    *("", " ", "é", "x" * 999, "a\nb", "a\0b", "\ud800", "{0}"),
    *("${oc.env:NOT_SET_X}", "../x", "~nobody/x", "/dev/null"),
    *([], [None], ["a", 3], [[]], {}, {"": 1}, {"é": None}, {"a": {"b": []}}),
)
# What disks and people put into a file.
ODD_BYTES = (
    *(b"\x00", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"[" * 2000, b"{", b'"', b"\n", b"\r\n", b"\t", b"null", b"1e999"),
    *(b"-", b"9" * 5000, b"&a *a", b"${", b"#"),
)
# For `parametrize`: a few seeds in every tier, many in the full one.
SEEDS = [range(10), pytest.param(range(10, 500), marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]


def mutated(sound: Any, chance: random.Random) -> Any:
    """A copy of plain data, or of bytes, with one change anywhere."""
    return _damaged(sound, chance) if isinstance(sound, bytes) else _changed(sound, chance)


def try_mutations(
    read: Callable[[Any], object], sound: Any, seeds: Iterable[int], refusals: type[Exception] | tuple = ()
) -> int:
    """Reads a change of `sound` for each seed, and returns how many were refused; any other error fails the test."""
    refused = 0
    for seed in seeds:
        document = mutated(sound, random.Random(seed))
        try:
            read(document)
        except refusals:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {document!r:.2000}") from error
    return refused


def _changed(sound: Any, chance: random.Random) -> Any:
    document = _copied(sound)
    places = list(_places(document))
    holder, key = chance.choice(places)
    value = holder[key]
    match chance.randrange(6):
        case 0:
            del holder[key]
        case 1:
            other, name = chance.choice(places)
            holder[key] = _copied(other[name])
        case 2 if isinstance(holder, list):
            holder.insert(key, _copied(value))
        case 2:
            holder[chance.choice(["x", "", "name", "type", f"{key}s", chance.choice(list(document))])] = value
        case 3:
            holder[key] = chance.choice([[value], {"x": value}, str(value)])
        case _:
            holder[key] = chance.choice(ODD)
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a document, as its holder and its key."""
    for key in list(document) if isinstance(document, dict) else range(len(document)):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from _places(document[key])


def _copied(document: Any) -> Any:
    if isinstance(document, dict):
        return {key: _copied(value) for key, value in document.items()}
    return [_copied(value) for value in document] if isinstance(document, list) else document


def _damaged(sound: bytes, chance: random.Random) -> bytes:
    """Some part cut, repeated or removed, or odd bytes in its place."""
    low, high = sorted(chance.randrange(len(sound) + 1) for _ in range(2))
    odd, end = chance.choice(ODD_BYTES), chance.choice([low, high, len(sound)])
    return chance.choice([sound[:low] + odd + sound[end:], sound[:high] + sound[low:], sound[:low] + sound[high:]])
