"""What a library builds at the first use of a type, built at import instead.

msgspec builds the tables of a type when it first decodes one, without a lock: a thread that comes while another builds
them may read half a table, and the interpreter crashes. Invariant: every type that msgspec decodes in this package is
`prepared`, so its tables, and those of all types that it holds, are complete before any thread uses them.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_ONE_AT_A_TIME = threading.Lock()


def prepared(kind: type[T]) -> type[T]:
    """Builds msgspec's tables of a type; a decorator of classes. What it names must be defined above it."""
    with _ONE_AT_A_TIME:
        msgspec.json.Decoder(kind)
    return kind
