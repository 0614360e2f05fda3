"""Too many failed groups end the run; a few do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.errors import DataError
from megasync.rollout.rollouter import FIRST_GROUPS, WINDOW, DropLimit
from megasync.rollout.selection import Dropped


def test_the_summary_lists_each_drop_reason_with_an_example():
    limit = DropLimit(0.5)
    for number in range(FIRST_GROUPS - 1):
        limit.failed(f"0:{number}", Dropped(("no_response", "reward_error")[number % 2], f"problem {number}"))
    with pytest.raises(DataError) as stop:
        limit.failed("0:7", Dropped("no_response", "problem 7"))
    assert str(stop.value).splitlines()[1:] == [
        "  5 x no_response, such as group 0:7: problem 7",
        "  3 x reward_error, such as group 0:5: problem 5",
    ]


@given(st.lists(st.booleans(), max_size=300), st.sampled_from([0.1, 0.5, 1.0]))
def test_the_run_ends_only_above_the_drop_share_or_if_all_first_groups_fail(outcomes, share):
    limit = DropLimit(share)
    for seen, failed in enumerate(outcomes, 1):
        last = outcomes[max(0, seen - WINDOW) : seen]
        too_many = len(last) == WINDOW and sum(last) > share * WINDOW
        never = seen >= FIRST_GROUPS and all(outcomes[:seen])
        if not failed:
            limit.passed()
        elif too_many or never:
            with pytest.raises(DataError):
                limit.failed("0:1", Dropped("reason", ""))
            return
        else:
            limit.failed("0:1", Dropped("reason", ""))
