"""Small trajectories for tests that do not depend on their tokens."""

from megasync.trajectory import Trajectory


def trajectory(text="a", reward=None, *, tokens=2, finish_reason="stop", metrics=None, trained=1):
    return Trajectory(
        [1], [5] * tokens, [trained] * tokens, [-0.1] * tokens, [0] * tokens, finish_reason, text, reward, metrics or {}
    )
