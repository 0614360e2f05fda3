"""Keeps Ray 2.60.0 on the loopback interface if it runs on one host with address 127.0.0.1.

Ray replaces the node address 127.0.0.1 with the network address of the host, and then listens on all interfaces. On
Windows and macOS it does not, to avoid firewall dialogs; one of Ray's environment variables selects the behaviour.
While Ray starts, the patch sets that variable and the constant that this process has already read from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megasync_patches import Patch

# Whether nodes may have non-loopback addresses. Despite the variable's name, Ray reads it on every system.
VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def apply() -> None:
    """Sets the variable and the constant; see `applied`."""
    from ray._private import ray_constants

    os.environ[VARIABLE] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


@contextmanager
def applied() -> Iterator[None]:
    """Applies the patch within the context. Ray processes started inside keep it; this process does not.

    Raises:
        PatchError: the version of Ray is unknown.
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
    reason="on one host Ray replaces 127.0.0.1 by the host's network address, and listens on all interfaces",
    apply=apply,
    kinds=("cpu", "cuda"),
)
