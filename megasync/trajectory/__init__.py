"""What rollouts produce and training steps consume: trajectories, prompts and groups, as plain data."""

from megasync.trajectory.trajectory import (
    BASELINE,
    ROUTES,
    SUPPORT,
    SUPPORT_SIZES,
    TEACHER,
    TOKEN_REWARDS,
    Group,
    Ids,
    Partial,
    Prompt,
    Trajectory,
    by_sample,
    finite_float,
    of_sample,
    sample_rewards,
)

__all__ = [
    "BASELINE",
    "ROUTES",
    "SUPPORT",
    "SUPPORT_SIZES",
    "TEACHER",
    "TOKEN_REWARDS",
    "Group",
    "Ids",
    "Partial",
    "Prompt",
    "Trajectory",
    "by_sample",
    "finite_float",
    "of_sample",
    "sample_rewards",
]
