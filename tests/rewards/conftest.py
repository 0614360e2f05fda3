import pytest
from trajectories import trajectory


@pytest.fixture(scope="session")
def make_trajectory():
    return trajectory
