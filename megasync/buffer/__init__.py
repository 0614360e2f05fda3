"""The buffer between rollout and training: a pure state machine, its ledger, and both with waits.

`TrajectoryBuffer` decides (no asyncio, torch, Ray or files); `DurableBuffer` records; `AsyncBuffer` waits.
"""

from megasync.buffer.async_buffer import AsyncBuffer
from megasync.buffer.state import BufferClosed, BufferStateError, TrajectoryBuffer

__all__ = [
    "AsyncBuffer",
    "BufferClosed",
    "BufferStateError",
    "TrajectoryBuffer",
]
