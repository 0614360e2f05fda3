"""The files that come with megasync beside its modules: configurations, launch scripts and locks, examples, patches.

In a checkout they are at its root. A wheel has them inside the package, in megasync/shipped.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
INSIDE = PACKAGE / "shipped"
ROOT = INSIDE if INSIDE.is_dir() else PACKAGE.parent
LOCKS = ROOT / "launch"


def in_checkout() -> bool:
    """Whether megasync runs from a checkout of its repository, not from a wheel."""
    return ROOT != INSIDE
