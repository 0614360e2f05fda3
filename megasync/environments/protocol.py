"""The protocol of an environment, and how the configuration refers to one."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from megasync.base.confidential import masked
from megasync.base.importing import check_call, load_function
from megasync.concurrency.foreign import is_async, shown
from megasync.config.builtin import ENVIRONMENTS
from megasync.errors import ConfigError, DataError
from megasync.trajectory import finite_float

# The methods of an environment, with arguments as they get them.
METHODS: dict[str, tuple[Any, ...]] = {"reset": ({},), "step": ("",), "close": ()}


class Step(NamedTuple):
    """The result of an action. A plain tuple in this order is also accepted."""

    observation: str
    reward: float
    done: bool


class Environment(Protocol):
    """Plays one episode at a time. The methods are either all sync or all async.

    `reset` starts an episode, even if the previous one did not finish. An episode must depend only on the sample and
    the actions, so that the episodes of a group are comparable. An environment may also have a method `grade() ->
    float`: the reward of an episode that the turns or the context ended, beside that of its steps.
    """

    def reset(self, sample: dict[str, Any]) -> str:
        """Starts the episode of a dataset row and returns the first observation."""
        ...

    def step(self, action: str) -> Step:
        """Applies the model's text as an action. An invalid action is reported by the observation, not as an error."""
        ...

    def close(self) -> None: ...


def plain_answer(method: str, answer: Any) -> Any:
    """Converts the result of an environment's method, which may hold objects of its own, to plain data.

    Raises DataError for an answer of another form.
    """
    if method == "reset":
        if not isinstance(answer, str):
            raise DataError(f"reset must return the observation as text, not {shown(answer)}")
        return str(answer)
    if method == "grade":
        if (number := finite_float(answer)) is None:
            raise DataError(f"grade must return a finite reward, not {shown(answer)}")
        return number
    if method != "step":
        return None
    try:
        observation, reward, done = answer
        number, ended = finite_float(reward), bool(done)
    except Exception:  # noqa: BLE001 - whatever a user's environment returned
        raise DataError(f"step must return (observation, reward, done), not {shown(answer)}") from None
    if not isinstance(observation, str) or number is None:
        raise DataError(f"step must return text and a finite reward, not {shown(answer)}")
    return Step(str(observation), number, ended)


class Shared(Protocol):
    """An object that all environments of a class share, such as a server, made by `make_shared(seconds, **options)`.

    Each environment is then created as `Class(shared)`. `seconds` is the deadline of a server's start.
    """

    async def ready(self) -> None:
        """Makes it usable before an episode begins. Raises ServerError, or ConfigError for what cannot work."""
        ...

    async def close(self) -> None: ...


class SharingFactory:
    """Creates environments that share an object."""

    def __init__(self, func: Callable[[Any], Environment], shared: Shared) -> None:
        self.func = func
        self.shared = shared

    def __call__(self) -> Environment:
        return self.func(self.shared)


def environment_factory(kind: str, options: Mapping[str, Any], seconds: float = 600.0) -> Callable[[], Environment]:
    """A factory for a built-in kind or for "package.module:Class". Raises ConfigError, also for invalid options.

    `seconds` is the deadline for the start of a server that the environments share.
    """
    factory = load_function(ENVIRONMENTS.get(kind, kind))
    missing = [name for name in METHODS if not callable(getattr(factory, name, None))]
    if missing:
        raise ConfigError(f"the environment {kind!r} has no {', '.join(missing)}; it needs reset, step and close")
    shared = getattr(factory, "make_shared", None)
    given = () if shared is None else (seconds,)
    problem = f"the environment {kind!r} rejects its options {masked(options)}"
    check_call(shared or factory, problem, *given, **options)
    for name, arguments in METHODS.items():
        method = getattr(factory, name)
        # A method of a class takes the instance first.
        bound = isinstance(inspect.getattr_static(factory, name), staticmethod | classmethod)
        placeholders = arguments if bound else (None, *arguments)
        check_call(method, f"{name} of the environment {kind!r} must take {len(arguments)} argument(s)", *placeholders)
    asynchronous = {name for name in METHODS if is_async(getattr(factory, name))}
    if asynchronous and asynchronous != set(METHODS):
        raise ConfigError(
            f"the environment {kind!r} is async in {', '.join(sorted(asynchronous))} only; write all or none of its "
            f"methods as `async def`"
        )
    return partial(factory, **options) if shared is None else SharingFactory(factory, shared(seconds, **options))


def episode_seed(sample: Mapping[str, Any]) -> int:
    """The seed of a row's episode, 31 bits: its column `seed`, or else a hash of its prompt."""
    if "seed" in sample:
        return int(sample["seed"]) % 2**31
    return int.from_bytes(hashlib.sha256(repr(sample.get("prompt")).encode()).digest()[:4], "big") >> 1
