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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pickle import PickleBuffer
from typing import Any, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_intdigest

from megasync.concurrency.first_use import prepared
from megasync.errors import DataError
from megasync.trajectory import Group, Line, Partial, Support, Trajectory, Turn, sample_rewards, trained_tokens
from megasync.trajectory.runs import FloatArray, IntArray, Runs

# Arrays begin at multiples of this many bytes.
ALIGNMENT = 8
# Columns of fewer tokens are copied, which takes less time than handling each of them again.
COPIED_TOKENS = 2**13


@prepared
class TrajectoryHeader(msgspec.Struct, frozen=True, array_like=True):
    """Lengths are in tokens. ``prompt_at`` and ``at`` are where the arrays begin in the body, in bytes.

    The trajectory's own arrays are ``size`` bytes long. ``checksum`` (XXH3) is of these, with its prompt's as the seed,
    so that it can be read alone. Trajectories of a group with equal prompts have equal ``prompt_at``.
    ``response_inputs`` is the offset of the last trained response token: it and what follows are no inputs of the
    model. ``trained`` holds (version, number of trained tokens), ascending by version. Tokens older than ``mask_below``
    are masked. ``arrays`` are names, dtypes and shapes. ``turns`` says whether notes of its turns follow. ``line`` says
    what it is within its sample.
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
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    turns: bool
    line: Line | None
    mask_below: int = 0

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
    """A group on its way into the buffer: its header as MessagePack, and its body, in pieces or where it lies.

    Pieces of long responses are their very arrays: until they are written, the group is in memory once.
    """

    head: bytes
    pieces: Sequence[Any]
    place: StoredBody | None = None

    @cached_property
    def header(self) -> GroupHeader:
        return decode_header(self.head)

    @property
    def uid(self) -> str:
        return self.header.uid

    @property
    def body(self) -> Body:
        """Where it lies, or a copy of its pieces."""
        return self.place or b"".join(self.pieces)

    def stored(self, place: StoredBody) -> EncodedGroup:
        """Returns the group with its body at ``place``."""
        group = EncodedGroup(self.head, (), place)
        # It need not be decoded again.
        vars(group)["header"] = self.header
        return group

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        pieces = () if self.place else (_picklable(self.body, protocol),)
        return EncodedGroup, (self.head, pieces, self.place)


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


# Digest of the request, finish reason, text, and the columns.
_partial = msgspec.msgpack.Decoder(tuple[str, str, str, list[bytes]])


def _picklable(body: Body, protocol: SupportsIndex) -> Any:
    """The body as pickle takes it: with protocol 5 it crosses processes in shared memory, without a copy."""
    if isinstance(body, StoredBody):
        return body
    return PickleBuffer(body) if operator.index(protocol) >= 5 else bytes(body)


class _Writer:
    """Collects the pieces of a body: bytes and arrays, whose type does not say that they are buffers."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.size = 0

    def part(self, pieces: Iterable[Any], seed: int = 0) -> tuple[int, int, int]:
        """Adds pieces that are read together: where they begin, how long they are, and their checksum.

        The checksum begins with ``seed``. Arrays begin at multiples of the size of their entries.
        """
        self._align(ALIGNMENT)
        at, digest = self.size, xxh3_64(seed=seed)
        for piece in pieces:
            if not isinstance(piece, bytes):
                digest.update(self._align(min(ALIGNMENT, piece.itemsize)))
            digest.update(piece)
            self._add(piece)
        return at, self.size - at, digest.intdigest()

    def _align(self, alignment: int) -> bytes:
        padding = bytes(-self.size % alignment)
        if padding:
            self._add(padding)
        return padding

    def _add(self, piece: Any) -> None:
        self.pieces.append(piece)
        self.size += len(piece) if isinstance(piece, bytes) else piece.nbytes


def encode(group: Group) -> EncodedGroup:
    """Raises DataError for metrics or arrays that cannot be recorded."""
    writer = _Writer()
    prompts: dict[bytes, tuple[int, int, int]] = {}
    try:
        trajectories = tuple([_write(trajectory, writer, prompts) for trajectory in group.trajectories])
        newest = max([version for t in group.trajectories for version in t.versions.values.tolist()], default=0)
        weights = dict(group.weights)
        header = GroupHeader(group.uid, newest, writer.size, group.least, group.score, weights, trajectories)
        return EncodedGroup(_packer.encode(header), writer.pieces)
    except (NotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"group {group.uid} holds a value that cannot be recorded ({type(error).__name__}: {error}); rewards, "
            f"metrics and arrays must be plain numbers under text names"
        ) from error


def in_memory(group: Group) -> LeasedGroup:
    """The group as a batch has it, for callers without a buffer."""
    encoded = encode(group)
    return LeasedGroup(encoded.header, encoded.body)


def _write(t: Trajectory, writer: _Writer, prompts: dict[bytes, tuple[int, int, int]]) -> TrajectoryHeader:
    """``prompts`` holds where the prompts of earlier trajectories lie."""
    ids = t.prompt_ids.tobytes()
    if ids not in prompts:
        prompts[ids] = writer.part([ids])
    prompt_at, _, seed = prompts[ids]
    mask, versions = t.loss_mask, t.versions
    pieces: list[Any] = [t.response_ids, t.logprobs, mask.values, mask.ends, versions.values, versions.ends]
    if len(t.response_ids) < COPIED_TOKENS:
        pieces = [b"".join([column.tobytes() for column in pieces])]
    for name, array in t.arrays.items():
        if array.dtype.kind not in "iubf":
            raise TypeError(f"the array {name!r} has the type {array.dtype}")
        pieces.append(np.ascontiguousarray(array))
    if t.turns:
        pieces.append(_packer.encode(t.turns))
    at, size, checksum = writer.part(pieces, seed)
    return TrajectoryHeader(
        prompt_at=prompt_at,
        prompt_tokens=len(t.prompt_ids),
        at=at,
        size=size,
        checksum=checksum,
        response_tokens=len(t.response_ids),
        mask_runs=len(mask.values),
        version_runs=len(versions.values),
        response_inputs=_last_trained(mask),
        trained=tuple(sorted(trained_tokens(mask, versions).items())),
        reward=t.reward,
        finish_reason=t.finish_reason,
        metrics=t.metrics,
        sample=t.sample,
        arrays=tuple([(name, array.dtype.str, array.shape) for name, array in t.arrays.items()]),
        turns=bool(t.turns),
        line=t.line,
    )


def _last_trained(mask: Runs) -> int:
    """The offset of the last token that is trained; 0 without any."""
    ends = mask.ends.tolist()
    if ends and not mask.values[-1]:
        ends.pop()
    return ends[-1] - 1 if ends else 0


def decode_header(head: bytes) -> GroupHeader:
    """Raises ValueError for damaged bytes."""
    return _header.decode(head)


def encode_header(header: GroupHeader) -> bytes:
    return _packer.encode(header)


def decode(header: GroupHeader, body: bytes | memoryview) -> Group:
    """The group's trajectories as the header has them now, with tokens masked. Arrays are views of ``body``.

    Raises ValueError for a body that is not the one that was encoded, in what the header still names of it.
    """
    trajectories = decode_trajectories(header.trajectories, body)
    return Group(header.uid, trajectories, header.least, header.score, header.weights)


def decode_trajectories(headers: Iterable[TrajectoryHeader], body: bytes | memoryview) -> list[Trajectory]:
    """Decodes some trajectories of a body; the rest of it need not be there (`parts_of`)."""
    view = memoryview(body).toreadonly()
    words = np.frombuffer(view[: len(view) & -4], np.int32)
    floats = words.view(np.float32)
    prompts: dict[int, tuple[IntArray, int]] = {}
    trajectories: list[Trajectory] = []
    for header in headers:
        (prompt_at, prompt_size), (at, size) = parts_of(header)
        if prompt_at not in prompts:
            end = prompt_at + prompt_size
            prompts[prompt_at] = words[prompt_at // 4 : end // 4], xxh3_64_intdigest(view[prompt_at:end])
        prompt, seed = prompts[prompt_at]
        if xxh3_64_intdigest(view[at : at + size], seed) != header.checksum:
            raise ValueError(f"the trajectory at byte {at} of the body does not match its checksum")
        trajectories.append(_trajectory(header, prompt, words[at // 4 :], floats[at // 4 :], view[at : at + size]))
    return trajectories


def parts_of(header: TrajectoryHeader) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the prompt and the trajectory's own arrays lie in the body: first byte, and number of bytes."""
    return (header.prompt_at, 4 * header.prompt_tokens), (header.at, header.size)


def _trajectory(
    header: TrajectoryHeader, prompt: IntArray, words: IntArray, floats: FloatArray, part: memoryview
) -> Trajectory:
    """``words``, ``floats`` and ``part`` begin with the trajectory's own arrays."""
    tokens, masks, versions = header.response_tokens, header.mask_runs, header.version_runs
    mask_ends = 2 * tokens + masks
    version_values = mask_ends + masks
    version_ends = version_values + versions
    end = version_ends + versions
    at = 4 * end
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype, shape in header.arrays:
        at += -at % min(ALIGNMENT, np.dtype(dtype).itemsize)
        arrays[name] = np.frombuffer(part, dtype, math.prod(shape), at).reshape(shape)
        at += arrays[name].nbytes
    trajectory = Trajectory.of_fields(
        prompt,
        words[:tokens],
        Runs(words[2 * tokens : mask_ends], words[mask_ends:version_values]),
        floats[tokens : 2 * tokens],
        Runs(words[version_values:version_ends], words[version_ends:end]),
        header.finish_reason,
        "",
        header.reward,
        header.metrics,
        arrays,
        _turns.decode(part[at:]) if header.turns else (),
        header.sample,
        header.line,
    )
    return trajectory.masked(header.mask_below) if header.mask_below else trajectory


def encode_partial(partial: Partial) -> EncodedPartial:
    versions, support = partial.versions, partial.support
    columns = [partial.token_ids, partial.logprobs, versions.values, versions.ends]
    if support is not None:
        columns += [support.sizes, support.ids]
    texts = partial.request_digest, partial.finish_reason, partial.text
    data = _packer.encode((*texts, [column.tobytes() for column in columns]))
    return EncodedPartial(max(versions.values.tolist(), default=0), xxh3_64_digest(data) + data)


def decode_partial(data: bytes) -> Partial:
    """Raises ValueError for damaged bytes."""
    checksum, data = data[:8], data[8:]
    if xxh3_64_digest(data) != checksum:
        raise ValueError("a partial response does not match its checksum")
    request_digest, finish_reason, text, columns = _partial.decode(data)
    ids, logprobs, values, ends, *support = (np.frombuffer(column, np.int32) for column in columns)
    return Partial(
        request_digest,
        ids,
        logprobs.view(np.float32),
        Runs(values, ends),
        finish_reason,
        text,
        Support(*support) if support else None,
    )
