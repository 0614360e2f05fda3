"""The buffer between rollout and training: a pure state machine, its ledger, and both with waits.

`TrajectoryBuffer` decides (no asyncio, no torch, no Ray, no files); `AsyncBuffer` waits and records.
"""

from megasync.buffer.errors import BufferClosed, BufferStateError
from megasync.buffer.handle import AsyncBuffer
from megasync.buffer.state import TrajectoryBuffer

__all__ = [
    "AsyncBuffer",
    "BufferClosed",
    "BufferStateError",
    "TrajectoryBuffer",
]
