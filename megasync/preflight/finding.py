"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, FAILURE = "ok", "warning", "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` says what to do; it is empty when all is well."""

    subject: str
    status: str
    detail: str
    fix: str = ""
