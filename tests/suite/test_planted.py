"""Each planted fault (`tests/support/planted.py`) still finds its place in the source."""

import pytest
from planted import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{number} {fault.file}" for number, fault in enumerate(FAULTS)])
def test_the_text_of_a_planted_fault_is_there_once_and_the_faulty_file_compiles(fault: Fault):
    compile(fault.planted(ROOT), fault.file, "exec")
