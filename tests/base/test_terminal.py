"""A console outlives its reader."""

import os
import subprocess
import sys

import pytest

from megasync.base.terminal import Terminal

PROGRAM = """
import pytest

from megasync.base.terminal import Terminal
terminal = Terminal()
for number in range(3):
    terminal.print(number)
    print("by others", flush=True)
"""


def test_what_nobody_reads_goes_nowhere():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        terminal = Terminal(file=file)
        terminal.print("first")
        terminal.print("second")


@pytest.mark.processes
def test_a_program_whose_reader_has_gone_goes_on_to_its_end_without_a_word():
    """As of `megasync report runs/x | head -1`, or of a run whose `tee` was killed."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
