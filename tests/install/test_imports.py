"""Large packages are imported without the garbage collector, and only where they are needed."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from megasync.base.importing import quick_imports
from megasync.serving.router import Router


def test_garbage_collection_is_off_within_the_block_and_on_again_after_it():
    before = gc.get_freeze_count()
    try:
        with quick_imports():
            assert not gc.isenabled()
            with quick_imports():
                pass
            assert not gc.isenabled(), "the outer block still imports"
        assert gc.isenabled()
        assert gc.get_freeze_count() > before, "what was imported is not looked through again"
        with pytest.raises(ImportError), quick_imports():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_garbage_collection_that_was_off_stays_off():
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.processes
def test_the_router_starts_without_torch():
    *_, launch, _ = Router(["http://127.0.0.1:1"], "round_robin", "127.0.0.1", 0, "log").command()
    imports = launch.partition("setproctitle(")[0]
    code = f"{imports}\nprint([name for name in ('torch', 'sglang', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
