"""Whether verl finds megasync's engine: tried in a fresh interpreter, because verl hides a plugin's error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from megasync.integrations.verl_versions import SUPPORTED
from megasync.preflight.finding import FAILURE, OK, Finding

SUBJECT = "verl plugin"
# Seconds; verl imports torch, Ray, transformers and, on GPUs, Transformer Engine.
TIMEOUT = 300
# If verl does not know the engine, importing the plugin again says why.
PROBE = """
from verl.workers.engine.base import EngineRegistry
try:
    for kind in ("value_model", "language_model"):
        print(EngineRegistry.get_engine_cls(kind, "megasync").__module__)
except AssertionError:
    import megasync.integrations.verl
    raise
"""


def check_verl() -> Iterator[Finding]:
    wanted = " or ".join(SUPPORTED)
    try:
        found = version("verl")
    except PackageNotFoundError:
        yield Finding(SUBJECT, OK, f"verl is not installed; the plugin is for verl {wanted}")
        return
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, "VERL_ENGINE_DEVICE": "cuda"},
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        yield Finding(SUBJECT, FAILURE, f"importing verl {found} took more than {TIMEOUT} s", "import verl by hand")
        return
    if probe.returncode == 0:
        yield Finding(SUBJECT, OK, f"verl {found} has the engine of {probe.stdout.split()[-1]}")
        return
    reason = (probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
    fix = f"install verl {wanted} and megasync in one environment, and leave VERL_USE_EXTERNAL_PLUGINS unset"
    yield Finding(SUBJECT, FAILURE, f"verl {found} does not have the engine: {reason}", fix)
