"""The computed benchmark: its cases are planned, and are ones that a configuration may ask for."""

import pytest
import sync_model

from megasync.config.schema import ClusterConfig

CASES = {case.name: case for case in sync_model.CASES}


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-32B"])
def test_every_byte_of_a_case_is_placed(name):
    """Engine ranks keep the whole model in bfloat16, and at most vectors more than once."""
    row = [cell.strip() for cell in sync_model.row(CASES[name], nic=50.0, memory=2000.0).strip("|").split("|")]
    model, gpus, kept = float(row[1]), row[2], float(row[4])
    ranks = CASES[name].engine.world
    assert row[0] == name and gpus.endswith(f"{CASES[name].engines} x {ranks}")
    assert kept * ranks == pytest.approx(model, rel=0.005)


@pytest.mark.parametrize("case", sync_model.CASES, ids=lambda case: case.name)
def test_an_engine_fits_on_one_node(case):
    """A server is one tensor-parallel group on one node; a configuration with a wider one is refused."""
    assert case.engine.world == case.engine.tensor <= ClusterConfig().devices_per_node
    assert case.engine.data == case.engine.pipeline == 1
