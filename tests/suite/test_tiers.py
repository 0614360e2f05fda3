"""Of several like cases the standard tier runs some, the full one all."""

import subprocess
import sys

import pytest


@pytest.mark.every(3)
@pytest.mark.parametrize("case", range(7))
def test_a_case(case):
    """It is there to be collected by the test below."""


@pytest.mark.processes
def test_each_nth_case_runs_below_the_full_tier():
    command = [sys.executable, "-m", "pytest", "--collect-only", "--tier", "standard", "-k", "test_a_case", __file__]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert [int(line[-2]) for line in listed.splitlines() if "test_a_case[" in line] == [0, 3, 6]
