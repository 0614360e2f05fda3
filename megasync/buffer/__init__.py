"""The buffer between rollout and training: a pure state machine, its ledger, and both with waits.

`TrajectoryBuffer` decides (no asyncio, torch, Ray or files), `Ledger` records, and `AsyncBuffer` waits for both.
"""

from megasync.buffer.async_buffer import AsyncBuffer
from megasync.buffer.state import BufferClosed, BufferStateError, TrajectoryBuffer

__all__ = [
    "AsyncBuffer",
    "BufferClosed",
    "BufferStateError",
    "TrajectoryBuffer",
]
