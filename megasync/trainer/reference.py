"""The reference policy's weights: in host memory, and streamed to the device one block of the model at a time.

A block is the embedding, a decoder layer, the final norm or the output layer. During a scoring pass with the reference,
each block's parameters point into one of two slots on the device while that block computes, and the next block is
copied into the other slot meanwhile. So the device holds two additional blocks instead of a second model, and host
memory (pinned with CUDA) holds one copy.

The policy's weights are never written: only the ``data`` of the parameters is replaced, and `ReferenceWeights.applied`
always restores it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megasync.device import Device, record_event, side_stream, wait_event
from megasync.errors import TrainingError
from megasync.trainer.model import PolicyModel, named_weights

# Blocks on the device at a time: one computes while the next is copied.
SLOTS = 2
# Alignment of each tensor in a slot in bytes, like that of CUDA's allocator.
ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class _Block:
    """Tensors that are copied to the device as one block."""

    tensors: tuple[torch.Tensor, ...]
    # The values of the tensors in host memory, concatenated.
    kept: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(eq=False)
class _Slot:
    buffer: torch.Tensor
    holds: _Block | None = None
    # CUDA events of the copy into the slot and of the last computation that read it. None on a CPU.
    filled: Any = None
    read: Any = None


@dataclass(eq=False)
class _Pass:
    """One scoring pass: the slots, the parameters that point into them, and how often each module ran."""

    slots: list[_Slot]
    swapped: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    runs: dict[torch.nn.Module, int] = field(default_factory=dict)


class ReferenceWeights:
    """A copy of the current weights of ``chunks``.

    ``chunks`` are this rank's model chunks from `model.build_chunks`.
    """

    def __init__(self, chunks: Sequence[PolicyModel], device: Device) -> None:
        self._device = device
        # For each chunk, its modules with parameters in forward order, and the block of each.
        self._order = [_blocks(chunk, device) for chunk in chunks]
        blocks = [block for order in self._order for _, block in order]
        covered = {id(tensor) for block in blocks for tensor in block.tensors}
        missing = [name for name, tensor in named_weights(chunks).items() if id(tensor) not in covered]
        if missing:
            raise TrainingError(f"no block of the model contains {missing}, so the reference policy would lack them")
        # Of one slot; slots exist only within `applied`.
        self._slot_bytes = max(block.kept.nbytes for block in blocks)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Makes the chunks compute with these weights within the context.

        Raises TrainingError if some modules ran more often than others, so not every block used these weights.
        """
        device = self._device.torch_device
        buffers = [torch.empty(self._slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        ready = record_event(device)
        use = _Pass([_Slot(buffer, read=ready) for buffer in buffers])
        hooks = [hook for order in self._order for hook in self._hooks(order, use)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for tensor, data in use.swapped.items():
                tensor.data = data
            # The slots' memory is freed on this stream, so copies into it must have finished.
            for slot in use.slots:
                wait_event(slot.filled, device)
        for order in self._order:
            runs = {use.runs.get(module, 0) for module, _ in order}
            if len(runs) > 1:
                raise TrainingError(f"blocks of one model chunk ran {sorted(runs)} times with the reference weights")

    def _hooks(self, order: list[tuple[torch.nn.Module, _Block]], use: _Pass) -> Iterator[Any]:
        for place, (module, block) in enumerate(order):
            following = order[(place + 1) % len(order)][1]

            def enter(module: torch.nn.Module, _: Any, block: _Block = block, following: _Block = following) -> None:
                use.runs[module] = use.runs.get(module, 0) + 1
                slot = self._filled(use, block)
                wait_event(slot.filled, slot.buffer.device)
                for tensor, part in zip(block.tensors, _parts(block, slot.buffer), strict=True):
                    use.swapped.setdefault(tensor, tensor.data)
                    tensor.data = part
                if following is not block:
                    self._filled(use, following, busy=slot)

            def leave(_: torch.nn.Module, __: Any, ___: Any, block: _Block = block) -> None:
                for tensor in block.tensors:
                    tensor.data = use.swapped.pop(tensor)
                slot = next(slot for slot in use.slots if slot.holds is block)
                slot.read = record_event(slot.buffer.device)

            yield module.register_forward_pre_hook(enter)
            yield module.register_forward_hook(leave)

    def _filled(self, use: _Pass, block: _Block, busy: _Slot | None = None) -> _Slot:
        """The slot that contains a block or is being filled with it; never overwrites ``busy``."""
        for slot in use.slots:
            if slot.holds is block:
                return slot
        slot = next(slot for slot in use.slots if slot is not busy)
        device = slot.buffer.device
        with side_stream(device):
            wait_event(slot.read, device)
            slot.buffer[: block.kept.nbytes].copy_(block.kept, non_blocking=True)
            slot.filled = record_event(device)
        slot.holds = block
        # The least recently filled slot is reused first.
        use.slots.remove(slot)
        use.slots.append(slot)
        return slot


def _blocks(chunk: PolicyModel, device: Device) -> list[tuple[torch.nn.Module, _Block]]:
    """The modules of a chunk that have weights, in forward order, each with its block."""
    ends = [chunk.decoder.final_layernorm, chunk.output_layer] if chunk.post_process else []
    modules = [*([chunk.embedding] if chunk.pre_process else []), *chunk.decoder.layers, *ends]
    order = [(module, _block(module, device)) for module in modules]
    if chunk.pre_process and chunk.post_process and chunk.share_embeddings_and_output_weights:
        # The output layer uses the weight of the embedding.
        order[-1] = (chunk.output_layer, order[0][1])
    return order


def _block(module: torch.nn.Module, device: Device) -> _Block:
    biases = (buffer for name, buffer in module.named_buffers() if name.endswith(".expert_bias"))
    tensors, offsets, end = (*module.parameters(), *biases), [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    kept = torch.empty(end, dtype=torch.uint8, pin_memory=device.kind == "cuda")
    block = _Block(tensors, kept, tuple(offsets))
    for tensor, part in zip(tensors, _parts(block, kept), strict=True):
        part.copy_(tensor.detach())
    return block


def _parts(block: _Block, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """The block's tensors inside a buffer."""
    for tensor, offset in zip(block.tensors, block.offsets, strict=True):
        yield buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
