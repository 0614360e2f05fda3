"""Sandboxes that `bwrap` makes: the namespaces and the root folder are its work, all else is that of `local`.

Its advantage over the kind `process` is that this small, reviewed program makes the system calls. What ends a sandbox
is the same: the keeper kills `bwrap`, which takes its sandbox with it (`--die-with-parent`), and the first process ends
with its owner's socket. The number of files is not limited, only their bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from megasync.errors import ConfigError
from megasync.sandboxes.guest.namespaces import visible_paths
from megasync.sandboxes.local import KEEPER, OPTIONS, PYTHON, Isolation, LocalStarter, probe_order, start_order
from megasync.sandboxes.protocol import Limits, Spec

# Where a sandbox sees the scripts of its first process.
_SCRIPTS = "/.sandbox"
# What the first process needs to give programs a user of their own.
_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID")


class BubblewrapStarter(LocalStarter):
    """Starts sandboxes of the kind `bubblewrap`. Raises ConfigError where `bwrap` is missing or not permitted."""

    def __init__(self, spec: Spec) -> None:
        if spec.image is not None:
            raise ConfigError(f"a sandbox of kind bubblewrap takes no image ({spec.image}); use the kind process")
        super().__init__(spec)

    async def _order(self) -> dict[str, Any]:
        if problem := await asyncio.to_thread(_problem):
            raise ConfigError(f"sandbox kind bubblewrap: {problem}; use the kind process")
        return bubblewrap_order(self._spec)


@cache
def _problem() -> str:
    """Why `bwrap` makes no sandboxes here; empty if it does."""
    if shutil.which("bwrap") is None:
        return "the program bwrap is not on the PATH (Debian: apt install bubblewrap)"
    problem = probe_order(bubblewrap_order(Spec(limits=Limits())))
    return f"bwrap makes no sandbox here: {problem}" if problem else ""


def bubblewrap_order(spec: Spec) -> dict[str, Any]:
    """The order to the keeper for a sandbox of `bwrap`."""
    root = os.geteuid() == 0
    kind = Isolation("root" if root else "user", root)
    command = ["bwrap", "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv"]
    command += ["--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    if root:
        command += [word for name in _CAPABILITIES for word in ("--cap-add", name)]
    else:
        command += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    if not spec.network:
        command += ["--unshare-net"]
    command += ["--size", str(spec.limits.disk_mb * 2**20), "--tmpfs", "/"]
    paths = visible_paths(None, spec.visible, spec.network)
    # Those that bwrap makes itself only its own user can enter.
    for folder in sorted({str(above) for _, inside in paths for above in Path(inside).parents} - {"/"}):
        command += ["--perms", "0755", "--dir", folder] if not os.path.islink(folder) else []
    for source, inside in paths:
        if os.path.islink(source):
            command += ["--symlink", os.readlink(source), inside]
        elif os.path.exists(source):
            command += ["--dev-bind" if inside.startswith("/dev/") else "--ro-bind", source, inside]
    header = json.dumps({"limits": asdict(spec.limits), "namespaces": kind.namespaces, "user": "{user}"})
    command += ["--ro-bind", str(KEEPER.parent), _SCRIPTS, "--proc", "/proc", "--chdir", "/"]
    command += [PYTHON, *OPTIONS, f"{_SCRIPTS}/inside.py", header.replace('"{user}"', "{user}")]
    return start_order(spec, kind) | {"launcher": command}
