"""The memory in which a version is staged beside the live weights, and how that version becomes live.

A parameter that nothing else refers to has a *twin*: a second tensor of its size, into which its messages go while the
engine generates. A commit exchanges the memory of the two and copies nothing; what was live takes in the next version.
All other messages are kept as they came, and a commit copies them. `is_unshared` decides for each parameter, by looking
at who refers to its memory: when the plan arrives, and at each commit again, because an engine may have made views
meanwhile. Then the twin is copied. So views, ties and aliases keep seeing the parameter that they were made of.

An exchange changes addresses. An engine that remembers them (CUDA graphs, compiled kernels) must not have twins.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from megasync.device import pin, unpin
from megasync.layout.engine_layout import ParamRectangle
from megasync.sync.messages import InboundBucket, ReceivePlan

Params = Mapping[str, torch.Tensor]
# (rectangle of a parameter, what is copied into it)
Copy = tuple[torch.Tensor, torch.Tensor]

# Below this size, threads cost more than they save.
PARALLEL_BYTES = 2**22


class Arena:
    """One version of what a plan receives, on ``device``; about as large as the parameters that it writes."""

    def __init__(self, plan: ReceivePlan, params: Params, device: torch.device, exchange: bool) -> None:
        """Makes room. ``exchange``: parameters may change addresses, and a committed version need not stay here."""
        # Whether a committed version is still here, so that the next one can be sent as changes to it.
        self.keeps_versions = not exchange
        self._plan = plan
        wire = next(iter(params.values())).device
        names = _with_twin(plan, params) if exchange and wire == device else set[str]()
        # The first byte of each message that is kept, by tag.
        self._starts: dict[int, int] = {}
        nbytes = 0
        for bucket in plan.buckets:
            if any(rectangle.param not in names for rectangle in bucket.rectangles):
                self._starts[bucket.tag] = nbytes
                nbytes += bucket.nbytes
        # An engine in inference mode would make tensors that another thread may not write to.
        with torch.inference_mode(False):
            self._twins = {name: torch.empty_like(params[name], requires_grad=False) for name in sorted(names)}
            self._kept = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._direct = _lands(device, wire)
        self._pinned = _pins(self._kept.device, wire)
        if self._pinned:
            try:
                pin(self._kept)
            except RuntimeError as error:
                raise RuntimeError(f"{error}, or set sync.arena=device") from error
        # The addresses of the parameters, and the copies that a commit makes from what is kept.
        self._copies: tuple[list[int], list[Copy]] | None = None

    def close(self) -> None:
        if self._pinned:
            unpin(self._kept)

    # Staging

    def begin(self) -> None:
        """Fills the constants of parameters that have a twin; messages come after, as in a load."""
        for fill in self._plan.fills:
            if (twin := self._twins.get(fill.param)) is not None:
                fill.rectangle.of(twin).fill_(fill.value)

    def kept(self, bucket: InboundBucket) -> torch.Tensor:
        """Where a message stays until the commit, [nbytes] uint8."""
        start = self._starts[bucket.tag]
        return self._kept[start : start + bucket.nbytes]

    def landing(self, bucket: InboundBucket) -> torch.Tensor | None:
        """Where a message may arrive, [nbytes] uint8; None when it must be `put`: to be scattered, cast or moved."""
        if bucket.tag in self._starts:
            return self.kept(bucket) if self._direct else None
        rectangle, *others = bucket.rectangles
        twin = self._twins[rectangle.param]
        whole_rows = rectangle.col_stride == 1 and (rectangle.rows == 1 or rectangle.row_stride == rectangle.cols)
        if others or not whole_rows or twin.dtype != dtype_of(bucket):
            return None
        flat = twin.view(-1)[rectangle.offset : rectangle.offset + bucket.elements].view(torch.uint8)
        return flat if flat.numel() == bucket.nbytes else None

    def put(self, bucket: InboundBucket, message: torch.Tensor) -> None:
        """Takes in a message [nbytes] uint8 that had no landing."""
        if bucket.tag in self._starts:
            self.kept(bucket).copy_(message, non_blocking=True)
        else:
            for target, source in rectangles(bucket, message, self._twins):
                target.copy_(source)

    # Commit

    def commit(self, params: Params) -> None:
        """Makes what is staged the live weights. A version can be committed once: its memory may be live afterwards."""
        for fill in self._plan.fills:
            if fill.param not in self._twins:
                fill.rectangle.of(params[fill.param]).fill_(fill.value)
        shared: list[Copy] = []
        for name, twin in self._twins.items():
            param = params[name]
            if is_unshared(param):
                # As above: what was live is written to by another thread.
                with torch.inference_mode(False):
                    live = param.data
                    param.data = twin
                self._twins[name] = live
            else:
                shared.append((param, twin))
        copy_all(shared + self._kept_copies(params))
        # Caches of derived weights compare versions, which neither an exchange nor a copy in inference mode changes.
        written = [params[name] for name in self._plan.params]
        torch.autograd.graph.increment_version([param for param in written if not param.is_inference()])

    def _kept_copies(self, params: Params) -> list[Copy]:
        """The copies from what is kept, made again when a parameter has another address.

        They refer to the parameters, so they are not held where a parameter has a twin.
        """
        buckets = [bucket for bucket in self._plan.buckets if bucket.tag in self._starts]
        where = [params[rectangle.param].data_ptr() for bucket in buckets for rectangle in bucket.rectangles]
        if self._copies is not None and self._copies[0] == where:
            return self._copies[1]
        copies = [pair for bucket in buckets for pair in rectangles(bucket, self.kept(bucket), params)]
        if not self._twins:
            self._copies = where, copies
        return copies


def _lands(device: torch.device, wire: torch.device) -> bool:
    """Whether messages can arrive in an arena directly: not from a GPU in host memory."""
    return device == wire


def _pins(device: torch.device, wire: torch.device) -> bool:
    """Whether an arena is host memory beside a GPU."""
    return device.type == "cpu" and wire.type == "cuda"


def is_unshared(param: torch.Tensor) -> bool:
    """Whether no other tensor refers to the memory of a parameter: neither a view nor a tie, in Python or in C++."""
    return _references(param) == _references(torch.empty(1))


def _references(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _with_twin(plan: ReceivePlan, params: Params) -> set[str]:
    """The parameters whose memory is theirs alone, and of which a version writes every element."""
    written: dict[str, list[ParamRectangle]] = defaultdict(list)
    for bucket in plan.buckets:
        for rectangle in bucket.rectangles:
            written[rectangle.param].append(rectangle)
    for fill in plan.fills:
        if fill.param in written:
            written[fill.param].append(fill.rectangle)
    return {name for name, parts in written.items() if _owns_memory(params[name]) and _covered(params[name], parts)}


def _owns_memory(param: torch.Tensor) -> bool:
    fills_storage = param.is_contiguous() and param.untyped_storage().nbytes() == param.nbytes
    return fills_storage and not param.is_shared() and not param.is_inference() and is_unshared(param)


def _covered(param: torch.Tensor, parts: Iterable[ParamRectangle]) -> bool:
    written = torch.zeros(param.shape, dtype=torch.bool)
    for rectangle in parts:
        rectangle.of(written).fill_(True)
    return bool(written.all())


def copy_all(copies: Iterable[Copy]) -> None:
    """Fills the first tensor of each pair from the second; on a CPU with all cores that this thread may use."""
    pairs = list(copies)
    if not pairs:
        return
    cores = len(os.sched_getaffinity(0))
    if pairs[0][0].device.type != "cpu" or sum(target.nbytes for target, _ in pairs) < PARALLEL_BYTES:
        cores = 1

    def copy(first: int) -> None:
        targets, sources = zip(*pairs[first::cores], strict=True)
        # The views may come from a thread in inference mode, and so may only be written to in that.
        with torch.inference_mode():
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage] - no public name

    if cores == 1:
        copy(0)
        return
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(copy, range(min(cores, len(pairs)))))


def rectangles(bucket: InboundBucket, message: torch.Tensor, params: Params) -> Iterator[Copy]:
    """(rectangle of a parameter, the same rectangle of a message [nbytes] uint8) for all rectangles of a bucket."""
    values = message.view(dtype_of(bucket))
    start = 0
    for rectangle in bucket.rectangles:
        count = rectangle.rows * rectangle.cols
        source = values[start : start + count].view(rectangle.rows, rectangle.cols)
        yield rectangle.of(params[rectangle.param]), source
        start += count


def dtype_of(bucket: InboundBucket) -> torch.dtype:
    return getattr(torch, bucket.dtype)
