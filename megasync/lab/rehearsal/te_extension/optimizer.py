"""Operations on lists of tensors: Adam, scaling and norms.

``noop`` [1] is a flag: functions that find a value which is not finite set it, and Adam does nothing if it is set.
"""

from __future__ import annotations

import torch

Lists = list[list[torch.Tensor]]


def multi_tensor_scale(chunk: int, noop: torch.Tensor, lists: Lists, scale: float) -> None:
    """Writes ``scale`` times each tensor of the first list to its counterpart in the second."""
    sources, targets = lists
    for source, target in zip(sources, targets, strict=True):
        _flag(noop, source)
        target.copy_(source.float() * scale)


def multi_tensor_scale_tensor(chunk: int, noop: torch.Tensor, lists: Lists, scale: torch.Tensor) -> None:
    """Does the same as `multi_tensor_scale`, with a factor on the device."""
    sources, targets = lists
    for source, target in zip(sources, targets, strict=True):
        _flag(noop, source)
        target.copy_(source.float() * scale)


def multi_tensor_l2norm(
    chunk: int, noop: torch.Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all tensors together [1], float32, and with ``per_tensor`` that of each."""
    (tensors,) = lists
    device = noop.device
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    each = torch.stack(norms) if norms else torch.zeros(0, device=device)
    return torch.linalg.vector_norm(each).view(1), each if per_tensor else torch.empty(0, device=device)


def multi_tensor_unscale_l2norm(
    chunk: int, noop: torch.Tensor, lists: Lists, inverse_scale: torch.Tensor, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of `multi_tensor_l2norm` for the tensors times ``inverse_scale``."""
    total, each = multi_tensor_l2norm(chunk, noop, lists, per_tensor)
    return total * inverse_scale, each * inverse_scale


def multi_tensor_adam(
    chunk: int,
    noop: torch.Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam, computed in float32.

    ``lists`` are gradients, parameters, first and second moments, and possibly main weights, which are then updated
    and rounded to the parameters. With ``mode`` 1 the decay is decoupled (AdamW), with 0 it is part of the gradient.
    """
    if noop.device.type != "meta" and noop.item():
        return
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for grad, param, average, square, *main in zip(*lists, strict=True):
        weight = main[0] if main else param
        wide, value = grad.float(), weight.float()
        if not mode:
            wide = wide + weight_decay * value
        mean = average.float().lerp(wide, 1 - beta1)
        variance = square.float() * beta2 + (1 - beta2) * wide * wide
        update = (mean / first) / ((variance / second).sqrt() + eps)
        if mode:
            update = update + weight_decay * value
        average.copy_(mean)
        square.copy_(variance)
        weight.copy_(value - lr * update)
        if main:
            param.copy_(weight)


def multi_tensor_adam_param_remainder(chunk: int, noop: torch.Tensor, lists: Lists, *options: float) -> None:
    """One step of Adam with bfloat16 parameters, and of each float32 main weight its last 16 bits.

    A parameter is the first 16 bits of its main weight, plus one if the first of the last 16 is set.
    """
    *others, remainders = lists
    params = others[1]
    mains = []
    for param, remainder in zip(params, remainders, strict=True):
        high = param.view(torch.int16).int() - (remainder < 0).int()
        mains.append((high * 2**16 + (remainder.int() & 0xFFFF)).view(torch.float32))
    multi_tensor_adam(chunk, noop, [*others, mains], *options)  # pyright: ignore[reportArgumentType]
    for param, remainder, main in zip(params, remainders, mains, strict=True):
        bits = main.view(torch.int32)
        remainder.copy_((bits & 0xFFFF).to(torch.int16))
        param.copy_(((bits >> 16) + (remainder < 0).int()).to(torch.int16).view(torch.bfloat16))


def _flag(noop: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.device.type != "meta" and not bool(tensor.isfinite().all()):
        noop.fill_(1)
