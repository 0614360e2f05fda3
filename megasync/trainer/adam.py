"""The parameters of Adam as callers give them with a step. Without torch, for the driver."""

from typing import NamedTuple


class Adam(NamedTuple):
    """The parameters of one step of AdamW, in place of those that the configuration has."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    # The norm to which the gradient is clipped; 0 for none.
    clip_grad: float
