"""Trajectories, prompts and groups: what rollouts produce and training steps consume. Plain data: no torch, no Ray.

Tokens are arrays from the moment they are parsed, about 8 bytes each: int32 ids, float32 log-probs, and runs for what
hardly changes from token to token. Constructors accept lists too. Invariant: everything per token has as many entries
as there are tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megasync.errors import raised_as
from megasync.trajectory.runs import FloatArray, IntArray, Runs, float_array, int_array

Ids = Sequence[int] | NDArray[Any]
Numbers = Sequence[float] | NDArray[Any]
# Name of the array with a teacher's log-probs of the response tokens, float32 (`rollout.teachers`).
TEACHER = "teacher"
# Name of the array with the rewards of single response tokens, float32, NaN for tokens without one. They are parts of
# the trajectory's reward; what they leave of it counts at the last trained token.
TOKEN_REWARDS = "token_rewards"
# Name of the metric with the reward of the greedy response to the prompt.
BASELINE = "baseline"
# Name of the array with the experts of each position but the last, prompt and response, [prompt + response tokens - 1,
# expert layers, experts per token] (`layout.routes`).
ROUTES = "routes"
# Names of the arrays with the support of each response token, if truncated sampling chose it (`Support`): the
# sizes, and all ids, which are as many as the sizes add up to.
SUPPORT_SIZES, SUPPORT = "support_sizes", "support"
# The largest `top_k` whose support SGLang reports (`--sampling-mask-max-tokens`).
MAX_SUPPORT = 4096
# The role of what the policy sampled. Other turns have the role of their message, or none if it is unknown.
ANSWER = "answer"
# The most characters of a role or name, and of a call's arguments, and the most calls of an answer.
NAME, ARGUMENTS, CALLS = 80, 400, 16


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that truncated sampling (`top_k`, `top_p`, `min_p`) left to choose from, of consecutive positions.

    A server renormalises the probabilities of these tokens. A trainer that did so over the whole vocabulary would score
    another distribution than the one that was sampled: each log-prob would be lower by what was cut off, and the
    gradient would push up tokens that could not be sampled. So the server reports the support, and the trainer computes
    its softmax over it (keep sampling mask of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
    """

    # Numbers of tokens, [positions]; 0 where nothing was cut off.
    sizes: IntArray
    # The tokens of all positions, in order.
    ids: IntArray

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that do not match the ids."""
        if self.sizes.ndim != 1 or self.ids.ndim != 1 or (self.sizes.size and int(self.sizes.min()) < 0):
            raise ValueError(
                f"sizes {self.sizes.shape} and ids {self.ids.shape} must be one-dimensional, without a minus"
            )
        if (total := int(self.sizes.sum(dtype=np.int64))) != self.ids.size:
            raise ValueError(f"sizes add up to {total} tokens, and there are {self.ids.size} ids")

    @classmethod
    def of(cls, positions: Sequence[Sequence[int]]) -> Support:
        """The support of positions from the ids of each."""
        sizes = int_array([len(ids) for ids in positions])
        return cls(sizes, int_array([token for ids in positions for token in ids]))

    @classmethod
    def whole(cls, positions: int) -> Support:
        """The support of so many positions where nothing was cut off."""
        return cls(np.zeros(positions, np.int32), np.zeros(0, np.int32))

    @classmethod
    def join(cls, parts: Iterable[Support]) -> Support:
        """All positions of the parts, one after the other."""
        parts = [cls.whole(0), *parts]
        return cls(np.concatenate([part.sizes for part in parts]), np.concatenate([part.ids for part in parts]))

    def at(self, positions: NDArray[Any]) -> Support:
        """The support at the given positions, which ascend."""
        if len(positions) == len(self.sizes):
            return self
        wanted = np.zeros(len(self.sizes), dtype=bool)
        wanted[positions] = True
        return Support(self.sizes[positions], self.ids[np.repeat(wanted, self.sizes)])

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Support):
            return NotImplemented
        return np.array_equal(self.sizes, other.sizes) and np.array_equal(self.ids, other.ids)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an answer, with its arguments as the model wrote them."""

    name: str
    arguments: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _cut(self.name, NAME))
        object.__setattr__(self, "arguments", _cut(self.arguments, ARGUMENTS))


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens of a response that one author wrote: a note for people who read it. Nothing is trained on it.

    A note is small whatever a model, a tool or a user wrote: its texts are cut.
    """

    # First and past-the-last token, counted from the first token of the response.
    start: int
    end: int
    role: str = ""
    # The tool whose result this is.
    name: str = ""
    # Only an answer has any.
    calls: tuple[Call, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", _cut(self.role, NAME))
        object.__setattr__(self, "name", _cut(self.name, NAME))
        object.__setattr__(self, "calls", tuple(self.calls[:CALLS]))

    def moved(self, tokens: int) -> Turn:
        """The turn, that many tokens later."""
        return Turn(self.start + tokens, self.end + tokens, self.role, self.name, self.calls)


@dataclass(frozen=True, slots=True)
class Line:
    """A note of what a trajectory is within a sample that has several, for people who read it, as `Turn`.

    `rollout.lines` defines the words.
    """

    # What the line is, such as "final" or "sub-agent".
    kind: str
    # How it began, such as "branch" or "summary".
    origin: str
    # Its place among the lines of the sample, and that of the line that it came from, if any.
    number: int
    parent: int | None
    # The numbers of the first answer that it trains and of its last one, among all answers of the sample.
    first: int
    last: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _cut(self.kind, NAME))
        object.__setattr__(self, "origin", _cut(self.origin, NAME))


def within(turns: Iterable[Turn], tokens: int) -> tuple[Turn, ...]:
    """The parts of the turns in the first ``tokens``. Raises ValueError for turns that overlap or hold nothing."""
    kept, at = [], 0
    for turn in turns:
        if not at <= turn.start < turn.end:
            raise ValueError(f"a turn from token {turn.start} to {turn.end} follows one that ends at {at}")
        at = turn.end
        if turn.start < tokens:
            kept.append(turn if turn.end <= tokens else replace(turn, end=tokens))
    return tuple(kept)


def _cut(text: str, most: int) -> str:
    """Returns the first characters, without halves of surrogate pairs, which no file can store."""
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Trajectory:
    """One sampled response, token for token as the server produced it."""

    # The ids of the prompt, int32 [prompt tokens].
    prompt_ids: IntArray
    # The ids of everything behind the prompt, int32 [response tokens].
    response_ids: IntArray
    # 1 for tokens that the policy sampled, 0 for others (tool output, injected text), [response tokens].
    loss_mask: Runs
    # The behaviour policy's, as the server reports them, float32 [response tokens], natural logarithms.
    logprobs: FloatArray
    # The published weight version that sampled each token, as the server reports it, [response tokens].
    versions: Runs
    # "stop", "length" or "abort".
    finish_reason: str
    # For the reward function; the trainer does not get it.
    text: str
    # None until the trajectory is scored, and if the reward function declines to score it.
    reward: float | None
    # Numbers by name, of which the run shows the means.
    metrics: dict[str, float]
    # Further arrays by name, whose first dimension is the response tokens; only that of `ROUTES` has the prompt's too,
    # and that of `SUPPORT` any number.
    arrays: dict[str, NDArray[Any]]
    # Who wrote which tokens, where that is known; those behind the last token are left out.
    turns: tuple[Turn, ...]
    # The number of its sample within the group, which all trajectories of a conversation that forked share; None: it is
    # a sample of its own.
    sample: int | None
    # What it is among the trajectories of a conversation that forked.
    line: Line | None

    def __init__(
        self,
        prompt_ids: Ids,
        response_ids: Ids,
        loss_mask: Ids,
        logprobs: Numbers,
        versions: Ids,
        finish_reason: str = "stop",
        text: str = "",
        reward: float | None = None,
        metrics: dict[str, float] | None = None,
        arrays: Mapping[str, NDArray[Any]] | None = None,
        turns: Iterable[Turn] = (),
        sample: int | None = None,
        line: Line | None = None,
    ) -> None:
        """Raises ValueError, naming the field, for values of another kind or number."""
        _set(
            self,
            prompt_ids=_field("prompt_ids", int_array, prompt_ids),
            response_ids=_field("response_ids", int_array, response_ids),
            loss_mask=_field("loss_mask", _mask, loss_mask),
            logprobs=_field("logprobs", float_array, logprobs),
            versions=_field("versions", Runs.of, versions),
            finish_reason=finish_reason,
            text=text,
            reward=reward,
            metrics={} if metrics is None else metrics,
            arrays={name: np.asarray(array) for name, array in (arrays or {}).items()},
            turns=_field("turns", lambda given: within(given, len(response_ids)), turns),
            sample=sample,
            line=line,
        )
        if not self.prompt_ids.size:
            raise ValueError("a trajectory needs at least one prompt token")
        per_token = {"loss_mask": self.loss_mask, "logprobs": self.logprobs, "versions": self.versions}
        others = {name: array for name, array in self.arrays.items() if name not in (ROUTES, SUPPORT)}
        _check_lengths(len(self.response_ids), per_token | others)
        positions = len(self.prompt_ids) + len(self.response_ids) - 1
        if (routes := self.arrays.get(ROUTES)) is not None and (routes.ndim != 3 or len(routes) != positions):
            raise ValueError(
                f"{ROUTES} has the shape {routes.shape} for {positions} positions, and needs three dimensions"
            )
        if (SUPPORT in self.arrays) != (SUPPORT_SIZES in self.arrays):
            raise ValueError(f"it has one of the arrays {SUPPORT} and {SUPPORT_SIZES}, and needs both or none")
        _field(SUPPORT, lambda _: self.support, None)

    @classmethod
    def of_fields(cls, *values: Any) -> Trajectory:
        """Takes all fields in their order, and as they are: those of a trajectory that was taken apart."""
        trajectory = object.__new__(cls)
        for place, value in zip(_PLACES, values, strict=True):
            place(trajectory, value)
        return trajectory

    @property
    def support(self) -> Support | None:
        """The truncated-sampling support of each response token; None without truncation."""
        sizes = self.arrays.get(SUPPORT_SIZES)
        return None if sizes is None else Support(sizes, self.arrays[SUPPORT])

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among trained tokens; None when no token is trained."""
        return min(self.trained(), default=None)

    def trained(self) -> Counter[int]:
        """The number of trained tokens by version."""
        return Counter(trained_tokens(self.loss_mask, self.versions))

    def masked(self, least: int) -> Trajectory:
        """Returns the trajectory with tokens older than version ``least`` masked out of the loss."""
        if self.oldest_version is None or self.oldest_version >= least:
            return self
        return replace(self, loss_mask=Runs.of(self.loss_mask.expand() * (self.versions.expand() >= least)))

    def plain(self) -> dict[str, Any]:
        """All fields by name, with lists in the place of arrays, runs and turns, as for JSON."""
        plain = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        line = None if self.line is None else asdict(self.line)
        return plain | {"turns": [asdict(turn) for turn in self.turns], "line": line}

    def __eq__(self, other: object) -> bool:
        return _equal(self, other)


# Sets each field of a trajectory, which is frozen.
_PLACES = [getattr(Trajectory, each.name).__set__ for each in fields(Trajectory)]


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Partial:
    """The tokens generated so far of one response."""

    # Identifies the prompt and the sampling parameters: only a request with the same digest can continue the response.
    request_digest: str
    token_ids: IntArray
    logprobs: FloatArray
    versions: Runs
    finish_reason: str  # "stop" or "length" when complete
    text: str
    support: Support | None  # if sampling was truncated

    def __init__(
        self,
        request_digest: str,
        token_ids: Ids,
        logprobs: Numbers,
        versions: Ids,
        finish_reason: str = "abort",
        text: str = "",
        support: Support | None = None,
    ) -> None:
        """Raises ValueError, naming the field, for values of another kind or number."""
        _set(
            self,
            request_digest=request_digest,
            token_ids=_field("token_ids", int_array, token_ids),
            logprobs=_field("logprobs", float_array, logprobs),
            versions=_field("versions", Runs.of, versions),
            finish_reason=finish_reason,
            text=text,
            support=support,
        )
        per_token = {"logprobs": self.logprobs, "versions": self.versions}
        _check_lengths(len(self.token_ids), per_token if support is None else per_token | {"support": support})

    def __eq__(self, other: object) -> bool:
        return _equal(self, other)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A dataset row as a tokenized prompt."""

    # Unique across epochs and restarts: `"<epoch>:<row>"`.
    uid: str
    prompt_ids: list[int]
    # The row's other fields, passed to the reward function as keyword arguments.
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The scored trajectories of one prompt: the unit that is admitted, leased and trained."""

    uid: str
    trajectories: list[Trajectory]
    # Without so many samples the group is not trained: an estimator that compares samples needs two.
    least: int = 2
    # The mean reward of the prompt's samples as the task gave it, before penalties and selection; None takes that of
    # the trajectories.
    score: float | None = None
    # The weights of the reward functions whose scores the metrics hold, if there are several.
    weights: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among trained tokens of all trajectories; None when no token is trained."""
        return min((v for t in self.trajectories if (v := t.oldest_version) is not None), default=None)


def trained_tokens(mask: Runs, versions: Runs) -> dict[int, int]:
    """The number of tokens with a mask, by version."""
    ends, values = versions.ends.tolist(), versions.values.tolist()
    if len(values) == len(mask.values) == 1:
        # Sampled by one version, as most are.
        return {values[0]: ends[0]} if mask.values[0] else {}
    counts: dict[int, int] = {}
    start = at = 0
    for end, keep in zip(mask.ends.tolist(), mask.values.tolist(), strict=True):
        while start < end:
            stop = min(end, ends[at])
            if keep:
                counts[values[at]] = counts.get(values[at], 0) + stop - start
            start, at = stop, at + (stop == ends[at])
    return counts


class _OfSample(Protocol):
    """A trajectory or its header."""

    @property
    def sample(self) -> int | None: ...
    @property
    def reward(self) -> float | None: ...


T = TypeVar("T", bound=_OfSample)


def by_sample(trajectories: Iterable[T]) -> list[list[T]]:
    """The trajectories of each sample, in the order in which the samples begin."""
    samples: dict[object, list[T]] = {}
    for place, trajectory in enumerate(trajectories):
        number = trajectory.sample
        samples.setdefault(("alone", place) if number is None else number, []).append(trajectory)
    return [*samples.values()]


def of_sample(values: Sequence[float]) -> float:
    """The value of a sample from those of its trajectories: the mean.

    If all are equal it is exactly theirs, so that equal samples stay equal however often they forked.
    """
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def sample_rewards(trajectories: Iterable[_OfSample]) -> list[float]:
    """The reward of each sample that has one."""
    scored = ([t.reward for t in sample if t.reward is not None] for sample in by_sample(trajectories))
    return [of_sample(rewards) for rewards in scored if rewards]


def _field(name: str, convert: Any, values: Any) -> Any:
    with raised_as(ValueError, name, of=ValueError):
        return convert(values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, Runs):
        return list(value)
    return value.tolist() if isinstance(value, np.ndarray) else value


def _mask(values: Ids) -> Runs:
    runs = Runs.of(values)
    return runs if runs.values.size == 0 or set(runs.values.tolist()) <= {0, 1} else Runs.of(runs.expand() != 0)


def _set(target: object, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(target, name, value)


def _check_lengths(tokens: int, per_token: Mapping[str, Any]) -> None:
    for name, values in per_token.items():
        entries = "no" if isinstance(values, np.ndarray) and not values.ndim else len(values)
        if entries != tokens:
            raise ValueError(f"{name} has {entries} entries for {tokens} response tokens")


def _equal(one: Any, other: object) -> bool:
    """Whether all fields are equal; arrays by type and content."""
    names = [field.name for field in fields(one)]
    if type(one) is not type(other):
        return NotImplemented
    return all(_same(getattr(one, name), getattr(other, name)) for name in names)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    return one == other


def finite_float(value: Any) -> float | None:
    """The value as a float, or None if it is not a finite real number. Never raises.

    For rewards and metrics from users' code. Accepts Python's numbers and bools and scalars of NumPy and torch. Text is
    not a number, even if it spells one.
    """
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return None
    return number if math.isfinite(number) else None
