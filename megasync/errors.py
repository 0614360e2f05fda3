"""Errors a person is meant to read: each says what was wrong, where, and what to do."""


class MegasyncError(Exception):
    """Base of every error that megasync raises on purpose."""


class ConfigError(MegasyncError):
    """A refused configuration value: names the key, the value and the fix. Raised before any process starts."""


class DataError(MegasyncError):
    """A prompt, dataset, tokenizer or reward that cannot be used as given."""


class ContextFull(DataError):
    """A prompt that leaves no room for a response in the model's context: a conversation can go no further."""


class KillsServers(DataError):
    """A prompt whose requests kill the servers that they are sent to: it is not asked again."""


class ServerError(MegasyncError):
    """An SGLang server or router, or a service that a tool asks, that died, refused, or did not answer in time."""


class Refused(ServerError):
    """The server answered, with an error `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class InvalidAnswer(ServerError):
    """A server answered what makes no sense: the answer is refused as a whole, and asked for again."""


class SyncError(MegasyncError):
    """A weight sync that failed: names the engine, the phase and the version."""


class ParityError(SyncError):
    """Trainer and server disagree on log-probs of the same weights: carries both numbers."""


class Disagreement(ParityError):
    """Some servers disagree with the trainer although others agree: the fault is theirs, and the others hold the version.

    `reasons` are by server URL; `metrics` are those of the publish, which has come to its end.
    """

    def __init__(self, reasons: dict[str, str], metrics: dict[str, float]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons
        self.metrics = metrics


class TraceError(SyncError):
    """A serving engine loads weights in a way that moving rectangles cannot repeat: names the operation and the tensor."""


class TrainingError(MegasyncError):
    """A training step that cannot go on, such as after too many non-finite ones."""


class NotFinite(TrainingError):
    """More steps in a row than allowed had a loss or gradient that is not finite: not the fault of one batch."""


class StepFailed(TrainingError):
    """A training step raised an error that may come from its batch. What the ranks hold now is of no use."""


class ProcessLost(TrainingError):
    """A process died, or gave no answer within its deadline: no fault of the call, which can be made to a new process."""


class RankLost(ProcessLost):
    """A trainer rank died or hangs: all ranks can be started again from a checkpoint."""


class CheckpointError(MegasyncError):
    """A checkpoint that could not be written or read; what was saved before is untouched."""


class LedgerError(MegasyncError):
    """A ledger that cannot be opened, read or written: names the file and what to do. What it holds stays as it is."""
