"""The trainer ranks as the service uses them: data that clients sent is checked here, before any rank sees it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megasync.cluster.trainer_group import TrainerGroup
from megasync.config import Config
from megasync.config.schema import LoraConfig
from megasync.errors import DataError
from megasync.layout.adapter import AdapterShape, kinds_of_projections
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.service.interfaces import Adam, AdapterSpec, Datum, Pass, PassResult, ServedModel, WriteState
from megasync.tenants.passes import LossPass, PassPart
from megasync.tenants.rank import TenantTrainerRank
from megasync.tenants.sum_losses import LOSSES, REFUSED, SumLoss
from megasync.trainer.adam import Adam as AdamParameters

# The protocol's: an adapter of rank r is multiplied by ALPHA / r.
ALPHA = 32.0
TARGETS = "target_tokens"
# What every datum may have that no loss reads.
UNREAD = frozenset({"sampled_sequence"})


def trained_config(config: Config) -> Config:
    """The configuration of ranks for models of up to `trainer.lora.rank`, with adapters of any projection."""
    targets = sorted(set().union(*_kinds(config.model.path).values()))
    lora = LoraConfig(rank=config.trainer.lora.rank, alpha=ALPHA, targets=targets)
    # Adapters are written to files, so ranks hold no merged weights.
    sync = replace(config.sync, transport="adapters")
    return replace(config, trainer=replace(config.trainer, lora=lora), sync=sync)


def _kinds(path: str) -> dict[str, set[str]]:
    return kinds_of_projections(Layout(read_hf_config(path), Topology()))


class Ranks:
    """The `Trainer` of the service over the ranks of ``group``, whose configuration is that of `trained_config`."""

    def __init__(self, group: TrainerGroup, config: Config, served: ServedModel) -> None:
        self._group = group
        self._timeouts = config.timeouts
        self._served = served
        self._kinds = _kinds(config.model.path)

    async def create(self, model: str, spec: AdapterSpec) -> None:
        await self._group.on_all(
            self._timeouts.train_step, TenantTrainerRank.create_model, model, self._shape(spec), spec.seed
        )

    def _shape(self, spec: AdapterSpec) -> AdapterShape:
        """Raises DataError for a rank that is too large, and for adapters of nothing."""
        if not 1 <= spec.rank <= self._served.rank:
            raise DataError(f"the rank of adapters is {spec.rank}; it must be from 1 to {self._served.rank}")
        chosen = {"attention": spec.attention, "mlp": spec.mlp, "unembed": spec.unembed}
        targets = sorted({target for kind, wanted in chosen.items() if wanted for target in self._kinds[kind]})
        if not targets:
            raise DataError("train_attn, train_mlp and train_unembed are false, so nothing would be trained; set one")
        return AdapterShape(spec.rank, ALPHA / spec.rank, tuple(targets))

    async def compute(self, passes: Sequence[tuple[str, Pass]]) -> Sequence[PassResult | Exception]:
        results: list[PassResult | Exception | None] = [None] * len(passes)
        accepted: dict[int, tuple[str, LossPass]] = {}
        for place, (model, work) in enumerate(passes):
            try:
                accepted[place] = model, checked(work, self._served)
            except DataError as error:
                results[place] = error
        if accepted:
            deadline = self._timeouts.train_step * len(accepted)
            # Each rank answers for the sequences that it computed.
            answers = await self._group.on_all(deadline, TenantTrainerRank.compute_passes, [*accepted.values()])
            for place, parts in zip(accepted, zip(*answers, strict=True), strict=True):
                failed = next((part for part in parts if isinstance(part, Exception)), None)
                results[place] = failed or _joined(passes[place][1], cast("Sequence[PassPart]", parts))
        return cast("list[PassResult | Exception]", results)

    async def update(self, model: str, adam: Adam) -> Mapping[str, float]:
        parameters = AdamParameters(
            adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, max(0.0, adam.grad_clip_norm)
        )
        _check_adam(parameters)
        answers = await self._group.on_all(self._timeouts.train_step, TenantTrainerRank.update_model, model, parameters)
        applied, norm = answers[0]
        # The norm of a skipped step is no number.
        return {"skipped:sum": 0.0, "grad_norm:mean": norm} if applied else {"skipped:sum": 1.0}

    async def copy_state(self, model: str, optimizer: bool) -> WriteState:
        copies = await self._group.on_all(self._timeouts.train_step, TenantTrainerRank.copy_model, model, optimizer)
        state = copies[0]
        assert state is not None, "the first rank has the copies of all"
        return partial(asyncio.to_thread, state.write)

    async def load(self, model: str, spec: AdapterSpec, folder: Path, optimizer: bool) -> None:
        await self._group.on_all(
            self._timeouts.train_step,
            TenantTrainerRank.load_model,
            model,
            self._shape(spec),
            str(folder),
            optimizer,
        )

    async def unload(self, model: str) -> None:
        await self._group.on_all(self._timeouts.train_step, TenantTrainerRank.unload_model, model)

    async def restart(self) -> None:
        await self._group.restart()


def _check_adam(adam: AdamParameters) -> None:
    """Raises DataError for parameters with which a step is undefined."""
    for name, value in adam._asdict().items():
        if not math.isfinite(value) or value < 0:
            raise DataError(f"{name} is {value!r}; it must be a finite number of at least 0")
    for name in ("beta1", "beta2"):
        if (value := getattr(adam, name)) >= 1:
            raise DataError(f"{name} is {value!r}; it must be below 1")
    if adam.eps < (least := np.finfo(np.float32).tiny):
        # Fresh adapters have gradients of zero.
        raise DataError(f"eps is {adam.eps!r}; it must be at least {least:g}, or a gradient of zero has no step")


def _joined(work: Pass, parts: Sequence[PassPart]) -> PassResult:
    logprobs = {index: values for part in parts for index, values in zip(part.sequences, part.logprobs, strict=True)}
    outputs = [
        {"logprobs": logprobs[index].reshape(datum.inputs[TARGETS].shape)} for index, datum in enumerate(work.data)
    ]
    return PassResult(outputs, {"loss:sum": sum(part.sums.get("loss", 0.0) for part in parts)})


# Data


def checked(work: Pass, served: ServedModel) -> LossPass:
    """A pass, whose tokens `check_request` has accepted, as it travels to ranks.

    Raises DataError for what its client must change, which names datum and input.
    """
    if work.loss in REFUSED:
        raise DataError(f"the loss {work.loss!r} is not supported: {REFUSED[work.loss]}")
    if work.loss not in LOSSES:
        raise DataError(f"the loss {work.loss!r} is unknown; it must be one of {', '.join(LOSSES)}")
    loss = LOSSES[work.loss]
    defaults = {**loss.defaults, **_options(work, loss)}
    tokens = [np.asarray(datum.tokens, np.int32) for datum in work.data]
    targets = [_targets(index, datum, work.loss, loss, served.vocab) for index, datum in enumerate(work.data)]
    names = (*loss.required, *defaults)
    for index, datum in enumerate(work.data):
        if unknown := sorted(datum.inputs.keys() - {TARGETS, *names} - UNREAD):
            raise DataError(
                f"datum {index} has the input {unknown[0]!r}, which {work.loss} does not read; it reads "
                f"{', '.join((TARGETS, *names))}"
            )
    inputs = {
        name: np.concatenate(
            [
                _input(index, datum, name, targets[index].shape, defaults.get(name))
                for index, datum in enumerate(work.data)
            ]
        )
        for name in names
    }
    return LossPass(
        work.loss,
        work.backward,
        np.array([len(each) for each in tokens]),
        np.array([each.size // len(each) for each in targets]),
        np.concatenate(tokens),
        np.concatenate([each.reshape(-1) for each in targets]),
        inputs,
    )


def _options(work: Pass, loss: SumLoss) -> dict[str, float]:
    """The values of the configuration of a pass, which replace defaults of its loss."""
    known = loss.defaults if loss.configurable else {}
    for name, value in work.config.items():
        if name not in known:
            allowed = f"it has {', '.join(known)}" if known else "it has none"
            raise DataError(f"{work.loss} has no option {name!r} in loss_fn_config; {allowed}")
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise DataError(f"loss_fn_config has {name}={value!r}; it must be a finite number")
    return {name: float(value) for name, value in work.config.items()}


def _ids(index: int, name: str, ids: NDArray[Any], vocab: int) -> NDArray[np.int32]:
    if ids.min() < 0 or ids.max() >= vocab:
        wrong = int(ids[(ids < 0) | (ids >= vocab)].flat[0])
        raise DataError(f"datum {index} has the id {wrong} in its {name}; the vocabulary has ids from 0 to {vocab - 1}")
    return ids.astype(np.int32)


def _targets(index: int, datum: Datum, name: str, loss: SumLoss, vocab: int) -> NDArray[np.int32]:
    if TARGETS not in datum.inputs:
        raise DataError(f"datum {index} has no input {TARGETS!r}, which {name} requires")
    targets, count = np.asarray(datum.inputs[TARGETS]), len(datum.tokens)
    shapes = f"[{count}] or [{count}, targets]" if loss.several else f"[{count}]"
    if targets.ndim not in ((1, 2) if loss.several else (1,)) or len(targets) != count or not targets.size:
        raise DataError(
            f"datum {index} has {TARGETS} of shape {list(targets.shape)}, but {count} tokens; {name} needs {shapes}"
        )
    if targets.dtype.kind not in "iu":
        raise DataError(f"datum {index} has {TARGETS} of dtype {targets.dtype}; they must be integers")
    return _ids(index, TARGETS, targets, vocab)


def _input(index: int, datum: Datum, name: str, shape: tuple[int, ...], default: float | None) -> NDArray[np.float32]:
    """The values of an input at each target of a datum."""
    if name not in datum.inputs:
        if default is None:
            raise DataError(f"datum {index} has no input {name!r}, which the loss requires")
        return np.full(math.prod(shape), default, np.float32)
    values = np.asarray(datum.inputs[name])
    if values.shape != shape:
        raise DataError(
            f"datum {index} has {name} of shape {list(values.shape)}, but {TARGETS} of shape {list(shape)}; they must "
            f"be equal"
        )
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32) if values.dtype.kind in "iuf" else np.array(np.nan)
    if not np.isfinite(numbers).all():
        raise DataError(f"datum {index} has NaN, infinity or no numbers in its {name}; each must be a finite number")
    if name == "sequence_ratio_mask" and not numbers.any():
        raise DataError(f"datum {index} has a {name} of zeros; the ratio of its sequence needs at least one token")
    return numbers.reshape(-1)
