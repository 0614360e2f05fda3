"""What a step loads and scores follows from what its estimator and its loss read."""

import pytest

from megasync.algorithms.choose import estimate_columns, update_columns
from megasync.config.schema import AlgorithmConfig

# Columns that cost a pass over the model, or are read from trajectories only for some algorithms.
OPTIONAL = {"old", "reference", "norms", "teacher", "token_rewards", "chosen"}
PENALTY = {"kl_coef": 0.1, "kl_in": "reward"}


@pytest.mark.parametrize(
    ("algorithm", "step", "needed"),
    [
        ({}, {}, set()),
        ({}, {"minibatches": 2}, {"old"}),
        ({}, {"teachers": True}, {"teacher"}),
        ({"kl_coef": 0.1}, {}, {"reference"}),
        (PENALTY, {}, {"old", "reference"}),
        ({"advantage": "dpo"}, {}, {"old", "reference"}),
        ({"advantage": "gae"}, {"critic": True}, {"token_rewards"}),
        ({"advantage": "grpo_process", **PENALTY}, {}, {"token_rewards", "old", "reference"}),
        ({"advantage": "optimal_token_baseline"}, {}, {"token_rewards", "old", "norms"}),
        ({"loss": "kl_cov"}, {}, {"chosen"}),
    ],
)
def test_only_what_is_read_is_loaded_and_scored(algorithm, step, needed):
    config, step = AlgorithmConfig(**algorithm), {"minibatches": 1, "teachers": False, "critic": False} | step
    columns = estimate_columns(config, step["critic"])
    columns |= update_columns(config, step["minibatches"], step["teachers"])
    assert columns & OPTIONAL == needed
    assert {"behaviour", "ages"} <= columns
