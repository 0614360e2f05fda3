import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.pacing import Pacing
from megasync.config.schema import ScheduleConfig

PACINGS = st.builds(
    Pacing, st.integers(1, 64), st.integers(0, 8), st.integers(1, 8), st.none() | st.floats(0, 1, allow_nan=False)
)


@given(PACINGS)
def test_capacity_is_that_of_the_versions_in_flight(pacing):
    assert pacing.capacity == (pacing.max_staleness + 1) * pacing.groups_per_step * pacing.weight_sync_steps
    assert 1 <= pacing.window <= pacing.capacity


@given(PACINGS)
def test_the_bound_is_the_version_of_the_latest_step_that_can_train_a_group(pacing):
    """The closed form equals a count in which every group that may be trained earlier is."""
    before = pacing.capacity - 1 + pacing.window - 1
    step = before // pacing.groups_per_step + 1
    version = (step - 1) // pacing.weight_sync_steps
    assert pacing.staleness_bound == version


@given(PACINGS)
def test_strict_fifo_and_synchronous_training_have_no_slack(pacing):
    if pacing.window_fraction is None or pacing.max_staleness == 0:
        assert pacing.window == 1 and pacing.staleness_bound == pacing.max_staleness


def test_a_schedule_gives_its_pacing():
    schedule = ScheduleConfig(groups_per_step=16, max_staleness=1, weight_sync_steps=2, window_fraction=0.3)
    pacing = Pacing.of(schedule)
    assert (pacing.capacity, pacing.window, pacing.window_slack, pacing.staleness_bound) == (64, 19, 1, 2)


@pytest.mark.parametrize(
    "wrong", [{"groups_per_step": 0}, {"max_staleness": -1}, {"weight_sync_steps": 0}, {"window_fraction": 1.5}]
)
def test_an_invalid_value_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}="):
        Pacing(**{"groups_per_step": 1, "max_staleness": 1} | wrong)
