"""The section of what a run shows and leaves to be looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ObserveConfig:
    """What a run shows."""

    # Live terminal display; plain lines where there is no terminal.
    live: bool = True
    # Write TensorBoard files beside the metrics.
    tensorboard: bool = True
    # Sample answers written before and after training.
    samples: int = 8
