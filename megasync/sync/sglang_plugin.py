"""megasync inside SGLang: loaded by SGLang itself, in each of its processes, through its plugin entry point.

Two doors, both through stock endpoints. *Commands* arrive at every tensor-parallel rank's weight checker, need no pause,
and are answered per rank. A *commit* arrives as a weight update in megasync's load format, between ``begin_weight_update``
and ``end_weight_update``, and writes weights that a `Receiver` has at hand already.

All ranks report the same outcome of a commit: only the first rank's answer reaches the caller, and a rank that failed
alone would go on with other weights than its peers. Guaranteed by `_agree`, which each rank passes twice: before
anything is written (then the old weights serve on everywhere), and after. A command never raises, because the other
ranks already wait for this one's answer; errors come back as data.

A server that megasync has started with keys is guarded besides (`Guarded`): its HTTP routes are closed but for a few.

Besides `engine_blueprint` this is the only file that knows SGLang's insides. SGLang and torch are imported when a hook first runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from megasync_patches.sglang_score_bias import PATCH as SCORE_BIAS

from megasync.errors import ServerError
from megasync.serving.engine_protocol import (
    ACTION,
    ANSWER,
    CLASSIFIER_VARIABLE,
    LOAD_FORMAT,
    PROTOCOL,
    REFUSED,
    decode,
    encode,
)
from megasync.serving.server_guard import KEYS_VARIABLE, ServerGuard

_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_ADD_MIDDLEWARE = "sglang.srt.utils.auth.add_api_key_middleware"
_SERVE = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."

log = logging.getLogger(__name__)

# Bytes of what a rank may tell its peers.
MOST_SAID = 4096


@dataclass(frozen=True)
class ServingRank:
    """One tensor-parallel rank of this server, in whose process the plugin runs. ``model`` is SGLang's torch module."""

    model: Any
    tp_rank: int
    tp_size: int


class Receiver(Protocol):
    """Takes in new weights and writes them. One object a process, called from the scheduler's thread."""

    def handle(self, command: str, payload: dict[str, Any], rank: ServingRank) -> dict[str, Any]:
        """Answer a command that the plugin itself does not know. Must return soon: generation waits meanwhile."""

    def check(self, request: dict[str, Any], rank: ServingRank) -> None:
        """Raise when this rank cannot commit the request; write nothing."""

    def commit(self, request: dict[str, Any], rank: ServingRank) -> None:
        """Write the weights. Called once every rank's `check` has passed; raising here leaves the weights mixed."""


class ShardReceiver:
    """`sync.receiver.Receiver` for the model of this process, made with the first command."""

    def __init__(self) -> None:
        self._receiver: Any = None

    def handle(self, command: str, payload: dict[str, Any], rank: ServingRank) -> dict[str, Any]:
        if self._receiver is None:
            from megasync.layout.trace import live_tensors
            from megasync.sync.shard.receiver import Receiver

            self._receiver = Receiver(rank.tp_rank, lambda: live_tensors(rank.model))
        return self._receiver.handle(command, payload)

    def check(self, request: dict[str, Any], rank: ServingRank) -> None:
        if self._receiver is None:
            raise ServerError("this rank has not been told what it receives")
        self._receiver.check(request)

    def commit(self, request: dict[str, Any], rank: ServingRank) -> None:
        self._receiver.commit(request)


class _Committed:
    """In place of received tensors: the parameters are written already."""


class Plugin:
    """The hooks, around SGLang's own methods; each leaves alone what is not megasync's."""

    def __init__(self, receiver: Receiver | None = None) -> None:
        self._receiver = receiver
        self._commands: dict[str, Callable[[dict[str, Any], ServingRank], dict[str, Any]]] = {
            "hello": self._hello,
            "trace": self._trace,
        }
        self._traces: dict[str, dict[str, Any]] = {}
        self._instance = uuid.uuid4().hex

    def register(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for target, hook in (
            (_CHECKER, self.around_check),
            (_UPDATER + "receive_weights_from_distributed", self.around_receive),
            (_UPDATER + "load_weights_from_distributed", self.around_load),
        ):
            HookRegistry.register(target, hook, HookType.AROUND)

    def around_check(
        self,
        stock: Callable,
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
        place = checker._placement
        try:
            rank = ServingRank(checker._get_model(), place["tp_rank"], place["tp_size"])
            payload = decode(skip_tensor_list[0]) if skip_tensor_list else {}
            answer = {"ok": True, "result": self._answer(action.removeprefix(ACTION), payload, rank)}
        except Exception as error:
            log.exception("command %s failed", action)
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        return {
            "checksums": {ANSWER: encode({"tp_rank": place["tp_rank"], **answer})},
            "per_gpu_checksum": "",
            "parallelism_info": checker._parallelism_info(role=role).model_dump(),
        }

    def around_receive(
        self, stock: Callable, updater: Any, *, names: list[str], load_format: str | None = None, **rest: Any
    ) -> Any:
        """The commit: checked on all ranks, written, derived weights computed anew, and agreed on."""
        if load_format != LOAD_FORMAT:
            return stock(updater, names=names, load_format=load_format, **rest)
        state: dict[str, Any] = {}

        def check() -> None:
            if self._receiver is None:
                raise ServerError("the plugin of this server was registered without a receiver")
            _refuse_what_stock_updates_refuse(updater)
            place = _parallel()
            state["rank"] = ServingRank(updater.get_model(), place.tp_rank, place.tp_size)
            state["request"] = decode(names[0])
            self._receiver.check(state["request"], state["rank"])

        def commit() -> None:
            from sglang.srt.model_loader.loader import post_load_weights

            self._receiver.commit(state["request"], state["rank"])
            # SGLang calls this at the end of an update only when nothing was loaded in it.
            post_load_weights(state["rank"].model)

        _agree(check, f"{REFUSED}, the weights are as before")
        _agree(commit, "the commit failed, the weights are mixed")
        return _Committed()

    def around_load(self, stock: Callable, updater: Any, weights: Any) -> tuple[bool, str]:
        if isinstance(weights, _Committed):
            return True, "megasync has committed the weights"
        return stock(updater, weights)

    def _answer(self, command: str, payload: dict[str, Any], rank: ServingRank) -> dict[str, Any]:
        if command in self._commands:
            return self._commands[command](payload, rank)
        if self._receiver is None:
            raise ValueError(f"unknown command {command!r}; this plugin knows {', '.join(self._commands)}")
        return self._receiver.handle(command, payload, rank)

    def _hello(self, payload: dict[str, Any], rank: ServingRank) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "sglang": version("sglang"),
            "tp_rank": rank.tp_rank,
            "tp_size": rank.tp_size,
            "model": type(rank.model).__name__,
            "dtype": str(next(rank.model.parameters()).dtype).removeprefix("torch."),
            "pid": os.getpid(),
            # Process ids may be the same in two containers.
            "instance": self._instance,
        }

    def _trace(self, payload: dict[str, Any], rank: ServingRank) -> dict[str, Any]:
        from megasync.layout.trace import trace_load

        digest = hashlib.sha256(json.dumps(payload["specs"]).encode()).hexdigest()
        if digest not in self._traces:
            self._traces[digest] = trace_load(rank.model, payload["specs"]).to_json()
        return self._traces[digest]


class Guarded:
    """SGLang's HTTP server with megasync's guard in front of it.

    The keys never become server arguments, which SGLang logs, hands to its other processes and shows at `/server_info`.
    """

    def __init__(self, admin: str, generation: str | None) -> None:
        self._admin = admin
        self._generation = generation

    def register(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_SERVE, self.around_serve, HookType.AROUND)
        HookRegistry.register(_ADD_MIDDLEWARE, self.add_guard, HookType.REPLACE)

    def around_serve(self, stock: Callable, *arguments: Any, **options: Any) -> Any:
        from sglang.srt.runtime_context import get_serving

        serving = get_serving()
        # Neither would pass the guard: HTTP workers import the application anew, gRPC is another server beside it.
        if serving.tokenizer_worker_num != 1 or serving.grpc_port is not None:
            raise ServerError(
                f"a server with keys cannot be guarded with --tokenizer-worker-num={serving.tokenizer_worker_num} and "
                f"--grpc-port={serving.grpc_port}; leave both out of server_args, and SGLANG_GRPC_PORT unset"
            )
        # What makes SGLang ask for a guard, and what its own warm-up and collection of garbage call it with.
        with serving.override(admin_api_key=self._admin, api_key=self._generation):
            return stock(*arguments, **options)

    def add_guard(self, app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
        app.add_middleware(ServerGuard, admin=self._admin, generation=self._generation)


def register() -> None:
    """The entry point that SGLang calls."""
    Plugin(ShardReceiver()).register()
    # The HTTP server's own process, not those that it starts: nothing is left in the pipe for them.
    if KEYS_VARIABLE in os.environ and multiprocessing.parent_process() is None:
        Guarded(**json.loads(sys.stdin.buffer.read())).register()
    if os.environ.get(CLASSIFIER_VARIABLE) == "1" and SCORE_BIAS.needed():
        SCORE_BIAS.apply()


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _refuse_what_stock_updates_refuse(updater: Any) -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error

    updater._assert_weight_cache_inactive("a megasync commit")
    refusal = _unsupported_derived_weight_cache_error(updater.get_model())
    if refusal is not None:
        raise ServerError(refusal)


def _agree(step: Callable[[], None], outcome: str) -> None:
    """Take a step on each tensor-parallel rank; when it fails on any, raise on all of them what all of them said."""
    failure = ""
    try:
        step()
    except Exception as error:
        log.exception("a weight update failed")
        failure = f"{type(error).__name__}: {error}"
    failures = _gather(failure, _parallel().tp_group.cpu_group)
    if any(failures):
        said = "; ".join(f"tp rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        raise ServerError(f"{outcome}: {said}")


def _gather(text: str, group: Any) -> list[str]:
    """What each rank of the group said, cut to `MOST_SAID` bytes, in the order of ranks. As tensors: objects are pickled."""
    import torch
    import torch.distributed as dist

    mine = torch.zeros(MOST_SAID, dtype=torch.uint8, device="cpu")
    if said := text.encode()[:MOST_SAID]:
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    all_said = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_said, mine, group=group)
    return [bytes(said.tolist()).rstrip(b"\0").decode("utf-8", "replace") for said in all_said]
