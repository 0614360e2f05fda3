"""What the plugin imports in verl's processes, and when."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl.version", reason="verl is not installed; run `megasync install verl`")

LOOK = """
import sys
import verl.experimental.reward_loop
assert "megasync.integrations.verl" in sys.modules
names = ("megatron.core", "verl.workers.engine", "megasync.integrations.verl.engine")
loaded = [name for name in names if name in sys.modules]
print("before:", loaded)
from verl.workers.engine.base import EngineRegistry
print("after:", EngineRegistry.get_engine_cls("value_model", "megasync").__name__)
"""


def test_processes_that_compute_nothing_do_not_import_the_engine():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK],
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-2:] == ["before: []", "after: MegasyncValueEngine"], done.stderr[-3000:]


def test_an_unknown_name_is_refused_with_the_known_ones():
    import megasync.integrations.verl as plugin

    with pytest.raises(AttributeError, match=r"MegasyncConfig.*MegasyncEngineConfig"):
        plugin.MegasyncConfig  # noqa: B018
