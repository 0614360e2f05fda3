"""The data that parts of the service pass to each other, and the protocols of ranks and servers that compute it.

Everything is plain data, so ranks, endpoint and tests need none of each other's libraries. Names of losses, of their
inputs and of options are those of the protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The adapters of a model: their rank, the seed of their first values, and which projections have some."""

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True
    unembed: bool = True


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence, and what the loss reads at its positions."""

    # [tokens]
    tokens: Ints
    # float32 or int64, [tokens] or [tokens, targets]. Position i of `target_tokens` is what the model predicts after
    # token i. If the client says which targets were sampled, `sampled_sequence` [tokens] numbers the sampled sequences
    # of the datum, and is -1 elsewhere.
    inputs: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over data: the sum of a loss over all positions. ``backward`` adds its gradients to earlier ones."""

    loss: str
    config: Mapping[str, float | str]
    data: Sequence[Datum]
    backward: bool


@dataclass(frozen=True, slots=True)
class PassResult:
    """The results of a pass: arrays of each datum by name, as `logprobs` [tokens], and metrics as `name:reduction`."""

    outputs: Sequence[Mapping[str, Floats]]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Adam:
    """The parameters of one optimizer step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    # Norm to which the gradient is clipped; 0 for none.
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request for samples of one prompt."""

    prompt: Ints
    samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    # Texts or token ids that end a sample.
    stop: Sequence[str | int] = ()
    # Whether the model's end-of-sequence tokens end a sample as well; the protocol turns it off by an empty list of
    # stops.
    stop_at_eos: bool = True
    # The number of positions at the end of the prompt whose log-probs are returned; 0 for none.
    prompt_logprobs: int = 0
    # Of the same positions, or of all if there are none.
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    # Ids whose log-probs at each position of the prompt but the first are returned, [prompt - 1, targets]; -1 is none.
    target_prompt_logprobs: Ints | None = None


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest tokens of all positions and their log-probs, both [positions, k], with NaN where there are none.

    ``k`` is the number that was asked for, or the size of the vocabulary if that is smaller.
    """

    ids: Ints
    logprobs: Floats


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sample: its ids and log-probs [tokens], whether a stop ended it, and the version of each run of tokens."""

    ids: Ints
    logprobs: Floats
    stopped: bool
    # (name of the adapter, or "" for the base model; first token; end).
    versions: Sequence[tuple[str, int, int]]
    topk: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """The answer to a `Sampling`. Log-probs of a prompt are [prompt], with NaN where there is none."""

    samples: Sequence[SampledTokens]
    prompt_logprobs: Floats | None = None
    prompt_topk: TopLogprobs | None = None
    # [prompt - 1, targets], NaN where nothing was asked.
    target_logprobs: Floats | None = None
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The base model that the service trains and samples."""

    name: str
    context: int
    vocab: int
    # The largest rank of adapters.
    rank: int
    folder: Path = field(default_factory=Path)


# The name of the adapter with which a sample goes on. It stays available until the request ends.
Newest = Callable[[], Awaitable[str]]
# Writes a complete folder, or none: PEFT's files, and the optimizer's state if it was copied. Durable. Raises OSError.
# May be called while the ranks compute.
WriteState = Callable[[Path], Awaitable[None]]


class Trainer(Protocol):
    """The trainer ranks, as the service uses them. Models are named by ids that never repeat.

    Calls are made one at a time. A call raises `errors.DataError` for what a client must change, and
    `errors.RankLost` when the ranks have lost all state; the service then starts them again and repeats.
    """

    async def create(self, model: str, spec: AdapterSpec) -> None:
        """Makes fresh adapters."""
        ...

    async def compute(self, passes: Sequence[tuple[str, Pass]]) -> Sequence[PassResult | Exception]:
        """Computes passes of several models, those of each in their order; a failure of one touches no other."""
        ...

    async def update(self, model: str, adam: Adam) -> Mapping[str, float]:
        """Takes an optimizer step with the gradients of the model, and drops them.

        A non-finite gradient changes nothing: the metric `skipped:sum` is 1 then.
        """
        ...

    async def copy_state(self, model: str, optimizer: bool) -> WriteState:
        """Copies a model's adapters, with ``optimizer`` also its moments, and returns what writes the copy."""
        ...

    async def load(self, model: str, spec: AdapterSpec, folder: Path, optimizer: bool) -> None:
        """Makes the model what the folder holds, whether it existed or not; its gradients are gone."""
        ...

    async def unload(self, model: str) -> None:
        """Forgets a model; has no effect on an unknown one."""
        ...

    async def restart(self) -> None:
        """Starts the ranks again, without any model."""
        ...


class Sampler(Protocol):
    """The servers, as the service uses them. An adapter is named by a name that never repeats."""

    async def offer(self, adapter: str, folder: Path) -> None:
        """Makes a PEFT folder available under the name, until `withdraw`."""
        ...

    async def withdraw(self, adapter: str) -> None:
        """Lets servers forget an adapter that no request uses."""
        ...

    async def sample(self, sampling: Sampling, adapter: str, newest: Newest | None = None) -> Samples:
        """Samples with an adapter, or with the base model if the name is empty.

        With ``newest``, long samples go on with the adapter that it names by then.

        Raises `errors.DataError` for what a client must change; retries everything else within its deadline.
        """
        ...
