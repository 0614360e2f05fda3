"""Weight updates inside SGLang: commands at the ranks' weight checkers, and commits in megasync's load format.

Two kinds of request arrive through stock endpoints. *Commands* reach every rank's weight checker, need no pause, and
are answered per rank. A *commit* arrives as a weight update in megasync's load format, between ``begin_weight_update``
and ``end_weight_update``, and writes weights that the `ShardReceiver` of the process already holds.

All ranks report the same result of a commit: only the first rank's answer reaches the caller, and a rank that failed
alone would keep other weights than its peers. Guaranteed by `all_succeed`, which each rank passes twice: before
anything is written (then the old weights keep serving everywhere), and after. A command never raises, because the other
ranks already wait for this one's answer; errors come back as data.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from megasync.errors import ServerError
from megasync.serving.plugin_protocol import (
    ACTION,
    ANSWER,
    LOAD_FORMAT,
    PROTOCOL,
    RANKS_VARIABLE,
    REFUSED,
    Hello,
    RankAnswer,
    TraceRequest,
    decode,
    encode,
)
from megasync.sglang.hooks import Stock, all_succeed, hook, parallel

if TYPE_CHECKING:
    from megasync.layout.engine_layout import EngineRank
    from megasync.sync.shard.receiver import ShardReceiver

_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingRank:
    """One of the ``ranks`` of this server, in whose process the plugin runs. ``model`` is SGLang's torch module.

    Ranks of a pipeline stage are neighbours, and so are those of an engine, if the server has several; `in_server`
    counts them.
    """

    model: Any
    rank: int
    ranks: int

    @classmethod
    def in_server(cls, model: Any, place: Mapping[str, int]) -> ServingRank:
        """The rank with these tensor- and pipeline-parallel coordinates, in SGLang's names."""
        tensor = place["tp_size"]
        rank, ranks = place["pp_rank"] * tensor + place["tp_rank"], place["pp_size"] * tensor
        if of_server := os.environ.get(RANKS_VARIABLE):
            first, ranks = map(int, of_server.split("/"))
            rank += first
        return cls(model, rank, ranks)


def shard_receiver(rank: ServingRank) -> ShardReceiver:
    """The receiver of this process's model. It opens and allocates nothing before the first command."""
    from sglang.srt.runtime_context import get_flags

    from megasync.layout.load_trace import live_tensors
    from megasync.sync.shard.receiver import ShardReceiver

    # CUDA graphs and compiled code remember where parameters are.
    on_cpu = next(rank.model.parameters()).device.type == "cpu"
    exchange = on_cpu and not get_flags().capture.enable_torch_compile
    return ShardReceiver(rank.rank, lambda: live_tensors(rank.model), exchange)


class _Committed:
    """Stands for received tensors: the parameters are written already."""


class Plugin:
    """Hooks around SGLang's own methods; calls that are not for megasync pass through."""

    def __init__(self, make_receiver: Callable[[ServingRank], ShardReceiver] = shard_receiver) -> None:
        self._make_receiver = make_receiver
        self._receiver: ShardReceiver | None = None
        self._traces: dict[TraceRequest, EngineRank] = {}
        self._instance = uuid.uuid4().hex

    def register(self) -> None:
        hook("AROUND", _CHECKER, self.around_check)
        hook("AROUND", _UPDATER + "receive_weights_from_distributed", self.around_receive)
        hook("AROUND", _UPDATER + "load_weights_from_distributed", self.around_load)

    def around_check(
        self,
        stock: Stock,
        checker: Any,
        action: str,
        allow_quant_error: bool = False,
        skip_tensor_list: list[str] | None = None,
        *,
        role: str,
    ) -> dict[str, Any] | None:
        """A command, when the action names one."""
        if not action.startswith(ACTION):
            return stock(checker, action, allow_quant_error, skip_tensor_list, role=role)
        rank = ServingRank.in_server(None, checker._placement)
        try:
            rank = replace(rank, model=checker._get_model())
            payload = decode(skip_tensor_list[0]) if skip_tensor_list else {}
            answer = RankAnswer(rank.rank, True, self._answer(action.removeprefix(ACTION), payload, rank))
        except Exception as error:
            log.exception("Command %s failed", action)
            answer = RankAnswer(rank.rank, False, error=f"{type(error).__name__}: {error}")
        return {
            "checksums": {ANSWER: encode(answer)},
            "per_gpu_checksum": "",
            "parallelism_info": checker._parallelism_info(role=role).model_dump(),
        }

    def around_receive(
        self, stock: Stock, updater: Any, *, names: list[str], load_format: str | None = None, **rest: Any
    ) -> Any:
        """A commit: checked on all ranks, written, derived weights recomputed, and the result agreed on."""
        if load_format != LOAD_FORMAT:
            return stock(updater, names=names, load_format=load_format, **rest)

        def check() -> tuple[ShardReceiver, Any, Any]:
            _check_update_supported(updater)
            ranks, model = parallel(), updater.get_model()
            place = {name: getattr(ranks, name) for name in ("tp_rank", "tp_size", "pp_rank", "pp_size")}
            receiver = self._receiver_of(ServingRank.in_server(model, place))
            return receiver, receiver.check(decode(names[0])), model

        def commit() -> None:
            from sglang.srt.model_loader.loader import post_load_weights

            from megasync.layout.load_trace import refresh_derived

            receiver, request, model = checked
            receiver.commit(request)
            # SGLang calls this at the end of an update only when nothing was loaded in it.
            post_load_weights(model)
            refresh_derived(model)

        checked = all_succeed(check, f"{REFUSED}, the weights are as before")
        all_succeed(commit, "the commit failed, the weights are mixed")
        return _Committed()

    def around_load(self, stock: Stock, updater: Any, named_tensors: Any) -> tuple[bool, str]:
        if isinstance(named_tensors, _Committed):
            return True, "megasync has committed the weights"
        return stock(updater, named_tensors)

    def _answer(self, command: str, payload: Any, rank: ServingRank) -> object:
        if command == "hello":
            return Hello(
                protocol=PROTOCOL,
                instance=self._instance,
                sglang=version("sglang"),
                rank=rank.rank,
                ranks=rank.ranks,
                model=type(rank.model).__name__,
                dtype=str(next(rank.model.parameters()).dtype).removeprefix("torch."),
                pid=os.getpid(),
            )
        if command == "trace":
            return self._trace(msgspec.convert(payload, TraceRequest), rank)
        return self._receiver_of(rank).handle(command, payload)

    def _receiver_of(self, rank: ServingRank) -> ShardReceiver:
        if self._receiver is None:
            self._receiver = self._make_receiver(rank)
        return self._receiver

    def _trace(self, request: TraceRequest, rank: ServingRank) -> EngineRank:
        from megasync.layout.load_trace import trace_load

        if request not in self._traces:
            self._traces[request] = trace_load(rank.model, request.specs)
        return self._traces[request]


def _check_update_supported(updater: Any) -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error

    updater._assert_weight_cache_inactive("a megasync commit")
    refusal = _unsupported_derived_weight_cache_error(updater.get_model())
    if refusal is not None:
        raise ServerError(refusal)
