"""Too many failed groups end the run; a few do not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import DataError
from megasync.rollout.drops import FIRST_GROUPS, LARGEST_SHARE, WINDOW, DropWatch


def test_a_run_whose_first_groups_all_fail_ends_with_the_causes():
    watch = DropWatch()
    for _ in range(FIRST_GROUPS - 1):
        watch.failed("reward_error", "division by zero")
    with pytest.raises(DataError, match="all of the first 8 groups were dropped.*8 x reward_error: division by zero"):
        watch.failed("reward_error", "division by zero")


def test_one_success_among_the_first_is_enough_to_go_on():
    watch = DropWatch()
    watch.passed()
    for _ in range(WINDOW - 2):
        watch.failed("unscored", "")
    with pytest.raises(DataError, match="63 of the last 64 groups were dropped.*63 x unscored"):
        watch.failed("unscored", "")


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=300))
def test_it_ends_exactly_when_the_share_is_over_the_limit_or_all_of_the_first_failed(outcomes):
    watch = DropWatch()
    for seen, failed in enumerate(outcomes, 1):
        last = outcomes[max(0, seen - WINDOW) : seen]
        too_many = len(last) == WINDOW and sum(last) > LARGEST_SHARE * WINDOW
        never = seen >= FIRST_GROUPS and all(outcomes[:seen])
        if not failed:
            watch.passed()
        elif too_many or never:
            with pytest.raises(DataError):
                watch.failed("reason", "")
            return
        else:
            watch.failed("reason", "")
