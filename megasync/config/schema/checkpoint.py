"""The section of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """What a run can go on from, and what it leaves."""

    # Training steps between checkpoints; 0 saves only at the end and on Ctrl-C.
    every_steps: int = 50
    # Checkpoints that are kept, newest first; the disk needs room for one more, as older ones go last.
    keep: int = 2
    # Write a Hugging Face checkpoint when the run ends.
    export: bool = True
