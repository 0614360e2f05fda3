"""A group as a header and a body: encoded once, where it is made, and decoded by the rank that trains it.

    header   what buffer and planner need: per trajectory its lengths, versions, reward and place in the body
    body     raw arrays, about 8 bytes a token; decoding is views of it, without a copy

    prompts         int32 ids; equal prompts of a group are there once
    per trajectory  int32 ids, float32 log-probs, runs of mask and versions (int32 values, then ends), further arrays,
                    notes of its turns as MessagePack

The body is opaque to the buffer. What becomes of a group later stands in the header alone: trajectories that were
removed are missing there, and ``mask_below`` masks old tokens. Nothing that is decoded is ever executed.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pickle import PickleBuffer
from typing import Any, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import NDArray

from megasync.concurrency.first_use import prepared
from megasync.errors import DataError
from megasync.trajectory import Group, Line, Partial, Support, Trajectory, Turn, sample_rewards
from megasync.trajectory.runs import Runs

# Arrays begin at multiples of this many bytes.
ALIGNMENT = 8


@prepared
class TrajectoryHeader(msgspec.Struct, frozen=True, array_like=True):
    """Lengths are in tokens. ``prompt_at`` and ``at`` are where the arrays begin in the body, in bytes.

    The trajectory's own arrays are ``size`` bytes long. ``checksum`` (CRC-32) is of its prompt and these, so that it
    can be read alone. Trajectories of a group with equal prompts have equal ``prompt_at``. ``response_inputs`` is the
    offset of the last trained response token: it and what follows are no inputs of the model. ``trained`` holds
    (version, number of trained tokens), ascending by version. Tokens older than ``mask_below`` are masked. ``arrays``
    are names, dtypes and shapes. ``turns`` is the length of the notes of its turns, in bytes. ``line``
    says what it is within its sample.
    """

    prompt_at: int
    prompt_tokens: int
    at: int
    size: int
    checksum: int
    response_tokens: int
    mask_runs: int
    version_runs: int
    response_inputs: int
    trained: tuple[tuple[int, int], ...]
    reward: float | None
    finish_reason: str
    metrics: dict[str, Any]
    sample: int | None
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    mask_below: int = 0
    turns: int = 0
    line: Line | None = None

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among trained tokens; None when no token is trained."""
        return self.trained[0][0] if self.trained else None

    @property
    def trained_tokens(self) -> int:
        return sum(tokens for _, tokens in self.trained)

    def masked(self, least: int) -> TrajectoryHeader:
        """The header with tokens older than version ``least`` masked out of the loss."""
        kept = tuple((version, tokens) for version, tokens in self.trained if version >= least)
        if kept == self.trained:
            return self
        return msgspec.structs.replace(self, trained=kept, mask_below=least)


@prepared
class GroupHeader(msgspec.Struct, frozen=True, array_like=True):
    """``newest_version`` is that of any token. ``body_bytes`` is the length of the whole body.

    ``least``, ``score`` and ``weights`` are the group's, as ``sample`` is the trajectory's (`trajectory.Group`).
    """

    uid: str
    newest_version: int
    body_bytes: int
    least: int
    score: float | None
    weights: dict[str, float]
    trajectories: tuple[TrajectoryHeader, ...]

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among trained tokens of all trajectories; None when no token is trained."""
        return min((v for t in self.trajectories if (v := t.oldest_version) is not None), default=None)

    @property
    def mean_reward(self) -> float | None:
        """The ``score``, else the mean reward of the samples; None without any."""
        rewards = sample_rewards(self.trajectories) if self.score is None else [self.score]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def trained_tokens(self) -> int:
        return sum(trajectory.trained_tokens for trajectory in self.trajectories)

    def of(self, trajectories: Iterable[TrajectoryHeader]) -> GroupHeader:
        """The group with these of its trajectories."""
        return msgspec.structs.replace(self, trajectories=tuple(trajectories))


@dataclass(frozen=True, slots=True)
class StoredBody:
    """Where a recorded body lies: the path of the segment file, and the offset in bytes."""

    path: str
    offset: int


# A body in memory, or where it lies.
Body = bytes | memoryview | StoredBody


@dataclass(frozen=True)
class EncodedGroup:
    """A group on its way into the buffer. ``head`` is the header as MessagePack."""

    head: bytes
    body: Body

    @cached_property
    def header(self) -> GroupHeader:
        return decode_header(self.head)

    @property
    def uid(self) -> str:
        return self.header.uid

    def stored(self, place: StoredBody) -> EncodedGroup:
        """Returns the group with its body at ``place``."""
        group = EncodedGroup(self.head, place)
        # It need not be decoded again.
        vars(group)["header"] = self.header
        return group

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return EncodedGroup, (self.head, _picklable(self.body, protocol))


@dataclass(frozen=True, slots=True)
class EncodedPartial:
    """An unfinished response on its way into the buffer, and the newest version of its tokens."""

    newest_version: int
    data: bytes


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """A group of a leased batch: its header, and its body or where that lies."""

    header: GroupHeader
    body: Body

    @property
    def uid(self) -> str:
        return self.header.uid

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _leased, (encode_header(self.header), _picklable(self.body, protocol))


def _leased(head: bytes, body: Body) -> LeasedGroup:
    return LeasedGroup(decode_header(head), body)


def _scalar(value: Any) -> Any:
    """Converts scalars of NumPy and torch, which users' functions return."""
    if hasattr(value, "item"):
        return value.item()
    raise NotImplementedError(type(value).__qualname__)


_packer = msgspec.msgpack.Encoder(enc_hook=_scalar)
_header = msgspec.msgpack.Decoder(GroupHeader)
_turns = msgspec.msgpack.Decoder(tuple[Turn, ...])


@prepared
class _PartialHeader(msgspec.Struct, frozen=True, array_like=True):
    request_digest: str
    finish_reason: str
    text: str
    tokens: int
    version_runs: int
    checksum: int
    # The number of ids of the support of all tokens; None without truncated sampling.
    support: int | None = None


_partial_header = msgspec.msgpack.Decoder(_PartialHeader)


def _picklable(body: Body, protocol: SupportsIndex) -> Any:
    """The body as pickle takes it: with protocol 5 it crosses processes in shared memory, without a copy."""
    if isinstance(body, StoredBody):
        return body
    return PickleBuffer(body) if operator.index(protocol) >= 5 else bytes(body)


class _Writer:
    """Collects arrays, which it copies once, in `body`. ``checksum`` is of what was added since it was last set."""

    def __init__(self) -> None:
        # Bytes and arrays, whose type does not say that they are buffers.
        self._parts: list[Any] = []
        self.size = 0
        self.checksum = 0

    def align(self, alignment: int) -> None:
        if padding := -self.size % alignment:
            self._append(b"\0" * padding, padding)

    def add(self, *arrays: NDArray[Any]) -> None:
        for array in arrays:
            self.align(min(ALIGNMENT, max(array.itemsize, 1)))
            self._append(array if array.flags.c_contiguous else array.copy(), array.nbytes)

    def add_words(self, *arrays: NDArray[Any]) -> None:
        """As `add`, for one-dimensional arrays with four bytes an entry, which need no padding after `align`."""
        for array in arrays:
            self._append(array if array.flags.c_contiguous else array.copy(), 4 * len(array))

    def _append(self, part: Any, size: int) -> None:
        self._parts.append(part)
        self.checksum = zlib.crc32(part, self.checksum)
        self.size += size

    def body(self) -> bytes:
        return b"".join(self._parts)


class _Reader:
    """Reads arrays in the order in which they were written, as views."""

    def __init__(self, body: bytes | memoryview, at: int = 0) -> None:
        self._body = body
        self._at = at

    def array(self, dtype: Any, count: int) -> NDArray[Any]:
        size = np.dtype(dtype).itemsize
        self._at += -self._at % min(ALIGNMENT, size)
        array = np.frombuffer(self._body, dtype, count, self._at)
        self._at += array.nbytes
        # A view of a file's mapping or of shared memory may be writable.
        array.flags.writeable = False
        return array

    def runs(self, count: int) -> Runs:
        return Runs(self.array(np.int32, count), self.array(np.int32, count))


def encode(group: Group) -> EncodedGroup:
    """Raises DataError for metrics or arrays that cannot be recorded."""
    writer, prompts = _Writer(), dict[bytes, tuple[int, int]]()
    trajectories = tuple(_write(trajectory, writer, prompts, group.uid) for trajectory in group.trajectories)
    newest = max((max(t.versions.values.tolist()) for t in group.trajectories if len(t.versions)), default=0)
    weights = dict(group.weights)
    header = GroupHeader(group.uid, newest, writer.size, group.least, group.score, weights, trajectories)
    try:
        return EncodedGroup(_packer.encode(header), writer.body())
    except (NotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"group {group.uid} holds a value that cannot be recorded ({type(error).__name__}: {error}); rewards and "
            f"metrics must be plain numbers under text names"
        ) from error


def in_memory(group: Group) -> LeasedGroup:
    """The group as a batch has it, for callers without a buffer."""
    encoded = encode(group)
    return LeasedGroup(encoded.header, encoded.body)


def _write(t: Trajectory, writer: _Writer, prompts: dict[bytes, tuple[int, int]], uid: str) -> TrajectoryHeader:
    """``prompts`` holds where the prompts of earlier trajectories begin, and their checksums."""
    prompt = t.prompt_ids.tobytes()
    if prompt not in prompts:
        writer.align(ALIGNMENT)
        at, writer.checksum = writer.size, 0
        writer.add(t.prompt_ids)
        prompts[prompt] = at, writer.checksum
    writer.align(ALIGNMENT)
    at = writer.size
    prompt_at, writer.checksum = prompts[prompt]
    mask, versions = t.loss_mask, t.versions
    writer.add_words(t.response_ids, t.logprobs, mask.values, mask.ends, versions.values, versions.ends)
    for name, array in t.arrays.items():
        if array.dtype.kind not in "iubf":
            raise DataError(f"group {uid} holds the array {name!r} of type {array.dtype}, which cannot be recorded")
        writer.add(array)
    turns = np.frombuffer(_packer.encode(t.turns) if t.turns else b"", np.uint8)
    writer.add(turns)
    return TrajectoryHeader(
        prompt_at=prompt_at,
        prompt_tokens=len(t.prompt_ids),
        at=at,
        size=writer.size - at,
        checksum=writer.checksum,
        response_tokens=len(t.response_ids),
        mask_runs=len(mask.values),
        version_runs=len(versions.values),
        response_inputs=max(
            (end - 1 for keep, end in zip(mask.values[-2:].tolist(), mask.ends[-2:].tolist(), strict=True) if keep),
            default=0,
        ),
        trained=tuple(sorted(t.trained().items())),
        reward=t.reward,
        finish_reason=t.finish_reason,
        metrics=t.metrics,
        sample=t.sample,
        arrays=tuple((name, array.dtype.str, array.shape) for name, array in t.arrays.items()),
        turns=len(turns),
        line=t.line,
    )


def decode_header(head: bytes) -> GroupHeader:
    """Raises ValueError for damaged bytes."""
    return _header.decode(head)


def encode_header(header: GroupHeader) -> bytes:
    return _packer.encode(header)


def check_body(header: GroupHeader, body: bytes | memoryview) -> None:
    """Raises ValueError for a body that is not the one that was encoded, in what the header still names of it."""
    if len(body) != header.body_bytes:
        raise ValueError(f"the body of group {header.uid} has {len(body)} of {header.body_bytes} bytes")
    view = memoryview(body)
    prompts: dict[int, int] = {}
    for trajectory in header.trajectories:
        (at, size), (own_at, own_size) = parts_of(trajectory)
        if at not in prompts:
            prompts[at] = zlib.crc32(view[at : at + size])
        if zlib.crc32(view[own_at : own_at + own_size], prompts[at]) != trajectory.checksum:
            raise ValueError(f"the body of group {header.uid} does not match its checksum (from byte {own_at} on)")


def decode(header: GroupHeader, body: bytes | memoryview) -> Group:
    """The group's trajectories as the header has them now, with tokens masked. Arrays are views of ``body``."""
    view = memoryview(body)
    return Group(
        header.uid,
        [decode_trajectory(t, *(view[at : at + size] for at, size in parts_of(t))) for t in header.trajectories],
        header.least,
        header.score,
        header.weights,
    )


def parts_of(header: TrajectoryHeader) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the prompt and the trajectory's own arrays lie in the body: first byte, and number of bytes."""
    return (header.prompt_at, 4 * header.prompt_tokens), (header.at, header.size)


def check_parts(header: TrajectoryHeader, prompt: bytes | memoryview, own: bytes | memoryview) -> None:
    """Raises ValueError for parts that are not those that were encoded."""
    if zlib.crc32(own, zlib.crc32(prompt)) != header.checksum:
        raise ValueError(f"the trajectory at byte {header.at} of the body does not match its checksum")


def decode_trajectory(header: TrajectoryHeader, prompt: bytes | memoryview, own: bytes | memoryview) -> Trajectory:
    """One trajectory, from the two parts of the body that hold it (`parts_of`); arrays are views of these.

    Raises ValueError for parts of other lengths than the header's.
    """
    tokens, masks, versions = header.response_tokens, header.mask_runs, header.version_runs
    mask_at = 2 * tokens
    versions_at = mask_at + 2 * masks
    # All of them have four bytes an entry, so one view of the memory serves all.
    numbers = _Reader(own).array(np.int32, versions_at + 2 * versions)
    further = _Reader(own, numbers.nbytes)
    trajectory = Trajectory.of_arrays(
        prompt_ids=_Reader(prompt).array(np.int32, header.prompt_tokens),
        response_ids=numbers[:tokens],
        loss_mask=Runs(numbers[mask_at : mask_at + masks], numbers[mask_at + masks : versions_at]),
        logprobs=numbers[tokens:mask_at].view(np.float32),
        versions=Runs(numbers[versions_at : versions_at + versions], numbers[versions_at + versions :]),
        finish_reason=header.finish_reason,
        reward=header.reward,
        metrics=header.metrics,
        arrays={name: further.array(dtype, math.prod(shape)).reshape(shape) for name, dtype, shape in header.arrays},
        turns=_turns.decode(further.array(np.uint8, header.turns).data) if header.turns else (),
        sample=header.sample,
        line=header.line,
    )
    return trajectory.masked(header.mask_below) if header.mask_below else trajectory


def encode_partial(partial: Partial) -> EncodedPartial:
    writer = _Writer()
    writer.add_words(partial.token_ids, partial.logprobs, partial.versions.values, partial.versions.ends)
    if partial.support is not None:
        writer.add_words(partial.support.sizes, partial.support.ids)
    body = writer.body()
    header = _PartialHeader(
        partial.request_digest,
        partial.finish_reason,
        partial.text,
        len(partial.token_ids),
        len(partial.versions.values),
        writer.checksum,
        None if partial.support is None else len(partial.support.ids),
    )
    head = _packer.encode(header)
    newest = int(partial.versions.values.max()) if len(partial.versions) else 0
    return EncodedPartial(newest, len(head).to_bytes(4, "little") + head + body)


def decode_partial(data: bytes) -> Partial:
    """Raises ValueError for damaged bytes."""
    size = int.from_bytes(data[:4], "little")
    header, body = _partial_header.decode(data[4 : 4 + size]), data[4 + size :]
    if zlib.crc32(body) != header.checksum:
        raise ValueError("a partial response does not match its checksum")
    reader, tokens, support = _Reader(body), header.tokens, header.support
    return Partial(
        header.request_digest,
        reader.array(np.int32, tokens),
        reader.array(np.float32, tokens),
        reader.runs(header.version_runs),
        header.finish_reason,
        header.text,
        None if support is None else Support(reader.array(np.int32, tokens), reader.array(np.int32, support)),
    )
