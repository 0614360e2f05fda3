"""Ray 2.60.0 on one machine stays on its loopback interface, as it is told to.

Ray replaces the address 127.0.0.1 that it is given for a node by the one that the machine has in a network, and listens on
all interfaces then. On Windows and macOS it does not, to spare people the questions of a firewall; a variable of Ray's
says which of the two it does. This sets that variable, and what this process has read from it already, while Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megasync_patches import Patch

# Ray reads it as "may a node have an address that others reach", whatever the system.
VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def apply() -> None:
    from ray._private import ray_constants

    os.environ[VARIABLE] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


@contextmanager
def applied() -> Iterator[None]:
    """What Ray starts meanwhile keeps it; this process may join another cluster later.

    Raises:
        PatchError: an unknown version of Ray.
    """
    if not PATCH.needed():
        yield
        return
    from ray._private import ray_constants

    variable, constant = os.environ.get(VARIABLE), ray_constants.ENABLE_RAY_CLUSTER
    PATCH.apply()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        if variable is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = variable


PATCH = Patch(
    name="ray_loopback",
    package="ray",
    versions=("2.60.0",),
    reason="on one machine Ray takes the machine's address for 127.0.0.1, and listens on all interfaces",
    apply=apply,
    kinds=("cpu", "cuda"),
)
