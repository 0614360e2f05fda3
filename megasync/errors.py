"""Errors that megasync raises on purpose. Each message says what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# What sandboxes are called among the services that fail.
SANDBOXES = "sandboxes"


class MegasyncError(Exception):
    """Base class of all errors that megasync raises on purpose."""


class ConfigError(MegasyncError):
    """A configuration value is refused. Names the key, the value and the fix; raised before any process starts."""


class DataError(MegasyncError):
    """A prompt, dataset, tokenizer or reward cannot be used as given."""


class TemplateRefused(DataError):
    """A chat template cannot render these messages. The message says what the template refused."""


class ContextLengthExceeded(DataError):
    """A prompt leaves no room for a response in the context length, so its conversation cannot continue."""


class EvaluationAbandoned(MegasyncError):
    """An evaluation of an exact version has no score: no server holds the version, or an answer is of another one."""


class PoisonPrompt(DataError):
    """This prompt crashes servers, or its user code crashes rollout workers, so it is not run again."""


class ServerError(MegasyncError):
    """An SGLang server, a router, or a service behind a tool died, refused a request, or did not answer in time."""


class ServiceFailed(ServerError):
    """An environment or a tool server failed, and not at what the model asked of it. `service` is its name."""

    def __init__(self, message: str, service: str) -> None:
        super().__init__(message, service)
        self.service = service

    def __str__(self) -> str:
        return str(self.args[0])


class ServiceDown(MegasyncError):
    """An environment or a tool server has failed for everybody for so long that samples no longer wait for it."""


class SandboxError(ServiceFailed):
    """A sandbox cannot be started, has died, or did not answer in time: not the fault of what runs in it."""

    def __init__(self, message: str, service: str = SANDBOXES) -> None:
        super().__init__(message, service)


class HttpStatusError(ServerError):
    """A server answered with an error `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineErrors(ServerError):
    """Engines of one server failed at what all of them were asked.

    ``errors`` has each engine's error, None for one that succeeded.
    """

    def __init__(self, message: str, errors: Sequence[ServerError | None]) -> None:
        super().__init__(message)
        self.errors = tuple(errors)


class InvalidAnswer(ServerError):
    """A server's answer is malformed or inconsistent. The whole answer is discarded and requested again."""


class SyncError(MegasyncError):
    """A weight sync failed. Names the engine, the phase and the version."""


class ParityError(SyncError):
    """Trainer and servers compute different log-probs with the same weights. The message contains both values."""


class ServerParityError(ParityError):
    """Some servers disagree with the trainer although others agree, so those servers are at fault.

    All other servers hold the version. `reasons` is keyed by server URL; `metrics` are those of the completed publish.
    """

    def __init__(self, reasons: dict[str, str], metrics: dict[str, float]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons
        self.metrics = metrics


class TraceError(SyncError):
    """An engine loads a weight by an operation that rectangle copies cannot reproduce. Names operation and tensor."""


class TrainingError(MegasyncError):
    """Training cannot continue, for example after too many non-finite steps."""


class NonFiniteError(TrainingError):
    """More steps in a row than allowed had a non-finite loss or gradient, so no single batch is at fault."""


class StepFailed(TrainingError):
    """A training step raised an error that its batch may have caused. The state of the ranks is unusable."""


class ProcessLost(TrainingError):
    """A process died or missed its deadline. The call itself is not at fault and can be repeated on a new process."""

    # The numbers of the processes in their group, if they are known, and whether they are alive but did not answer.
    slots: tuple[int, ...] = ()
    silent = False


class RankLost(ProcessLost):
    """A trainer rank died or is hung. All ranks can be restarted from a checkpoint."""


class CheckpointError(MegasyncError):
    """A checkpoint cannot be written or read. Earlier checkpoints are untouched."""


class LedgerError(MegasyncError):
    """A ledger cannot be opened, read or written. Names the file and the fix; its content is untouched."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, the errors of a group, and their explicit causes (`raise ... from`), outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from causes(each)
        error = error.__cause__


def is_infrastructure(error: BaseException) -> bool:
    """Whether an error is the fault of a server and not of a prompt: a ServerError is among its causes."""
    return any(isinstance(cause, ServerError) for cause in causes(error))


def failed_service(error: BaseException) -> str | None:
    """The name of the environment or tool server whose failure is among the causes of an error; None without one."""
    return next((cause.service for cause in causes(error) if isinstance(cause, ServiceFailed)), None)


@contextmanager
def raised_as(
    kind: type[Exception], what: str, fix: str = "", *, of: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Raises errors of the types `of` as one of this kind. The message says `what` failed, why, and the `fix`."""
    try:
        yield
    except of as error:
        raise kind(f"{what}: {error}" + (f"; {fix}" if fix else "")) from error
