"""Trajectories and the buffer between rollout and training: a pure state machine, its ledger, and both with waits.

`TrajectoryBuffer` decides (no asyncio, no torch, no Ray, no files); `AsyncBuffer` waits and records; `Pacing` is their
arithmetic.
"""

from megasync.buffer.errors import BufferClosed, BufferStateError
from megasync.buffer.handle import AsyncBuffer
from megasync.buffer.pacing import Pacing
from megasync.buffer.state import TrajectoryBuffer
from megasync.buffer.trajectory import Group, Partial, Prompt, Trajectory

__all__ = [
    "AsyncBuffer",
    "BufferClosed",
    "BufferStateError",
    "Group",
    "Pacing",
    "Partial",
    "Prompt",
    "Trajectory",
    "TrajectoryBuffer",
]
