"""megasync inside SGLang: SGLang itself loads it, in each of its processes, through its plugin entry point.

Two kinds of request arrive through stock endpoints. *Commands* reach every rank's weight checker, need no pause, and
are answered per rank. A *commit* arrives as a weight update in megasync's load format, between ``begin_weight_update``
and ``end_weight_update``, and writes weights that a `WeightReceiver` already holds.

All ranks report the same result of a commit: only the first rank's answer reaches the caller, and a rank that failed
alone would keep other weights than its peers. Guaranteed by `_all_succeed`, which each rank passes twice: before
anything is written (then the old weights keep serving everywhere), and after. A command never raises, because the other
ranks already wait for this one's answer; errors come back as data.

`dequantize_weights` is for servers of a folder in block FP8 or MXFP4, which they serve unquantized.

`request_arrays` lets requests for routes and supports through the router.

`PolicyAdapters` gives requests the adapter of the server's version.

`GroupSockets` keeps the processes of a server with attention groups off TCP.

`GuardedServer` closes all but a few HTTP routes of a server that megasync started with keys.

Besides `sglang_pipeline`, `sglang_handover`, `sglang_prompts` and `engine_blueprint` this is the only file that depends
on SGLang's internals. SGLang and torch are imported when a hook first runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from urllib.parse import parse_qs, urlsplit

import msgspec
from megasync_patches.sglang_score_bias import PATCH as SCORE_BIAS  # pyright: ignore[reportMissingImports] - the folder patches/

from megasync.errors import ServerError
from megasync.serving.engine_protocol import (
    ACTION,
    ADAPTERS_VARIABLE,
    ANSWER,
    CLASSIFIER_VARIABLE,
    HANDOVER_VARIABLE,
    KEPT_ADAPTER,
    LOAD_FORMAT,
    MANIFEST,
    PIPELINE_VARIABLE,
    POLICY_ADAPTER,
    PROTOCOL,
    RANKS_VARIABLE,
    REFUSED,
    ROUTES_FROM,
    SOCKETS_VARIABLE,
    STORAGE_VARIABLE,
    STORE_SCHEME,
    WITH_SUPPORT,
    Hello,
    RankAnswer,
    TraceRequest,
    decode,
    encode,
)
from megasync.serving.server_guard import KEYS_VARIABLE, ServerGuard
from megasync.sync.sglang_handover import Handover
from megasync.sync.sglang_pipeline import Pipeline, gather
from megasync.sync.sglang_prompts import PromptCalls

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from megasync.layout.engine_layout import EngineRank
    from megasync.layout.storage import Storage

_INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_ADD_MIDDLEWARE = "sglang.srt.utils.auth.add_api_key_middleware"
_SERVE = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
_GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"
_RESOLVE_ADAPTER = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_and_resolve_lora"
_SET_VERSION = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weight_version"
_LOAD_ADAPTER = "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter"
_PORTS = "sglang.srt.server_args.PortArgs.init_new"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller."
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."

log = logging.getLogger(__name__)

# The policy's adapters that stay loaded whether requests use them or not.
KEPT = 2

T = TypeVar("T")
# A hooked method of SGLang. It is passed on and called, never inspected.
Stock = Callable[..., Any]


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


class WeightReceiver(Protocol):
    """Takes in new weights and writes them. One object per process, called from the scheduler's thread.

    Requests are parsed JSON; what `handle` returns is a msgspec struct, or JSON's own types.
    """

    def handle(self, command: str, request: Any, /) -> object:
        """Answers a command that the plugin itself does not know. Must return soon: generation waits meanwhile."""

    def check(self, request: Any, /) -> Any:
        """The request in the form that `commit` takes. Raises when this rank cannot commit it; writes nothing."""

    def commit(self, request: Any, /) -> None:
        """Writes the weights. Called once every rank's `check` has passed; raising here leaves the weights mixed."""


def shard_receiver(rank: ServingRank) -> WeightReceiver:
    """The receiver of this process's model. It opens and allocates nothing before the first command."""
    from megasync.layout.trace import live_tensors
    from megasync.sync.shard.receiver import ShardReceiver

    return ShardReceiver(rank.rank, lambda: live_tensors(rank.model))


class _Committed:
    """Stands for received tensors: the parameters are written already."""


class Plugin:
    """Hooks around SGLang's own methods; calls that are not for megasync pass through."""

    def __init__(self, make_receiver: Callable[[ServingRank], WeightReceiver] = shard_receiver) -> None:
        self._make_receiver = make_receiver
        self._receiver: WeightReceiver | None = None
        self._traces: dict[TraceRequest, EngineRank] = {}
        self._instance = uuid.uuid4().hex

    def register(self) -> None:
        _hook("AROUND", _CHECKER, self.around_check)
        _hook("AROUND", _UPDATER + "receive_weights_from_distributed", self.around_receive)
        _hook("AROUND", _UPDATER + "load_weights_from_distributed", self.around_load)

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

        def check() -> tuple[WeightReceiver, Any, Any]:
            _check_update_supported(updater)
            parallel, model = _parallel(), updater.get_model()
            place = {name: getattr(parallel, name) for name in ("tp_rank", "tp_size", "pp_rank", "pp_size")}
            receiver = self._receiver_of(ServingRank.in_server(model, place))
            return receiver, receiver.check(decode(names[0])), model

        def commit() -> None:
            from sglang.srt.model_loader.loader import post_load_weights

            from megasync.layout.trace import refresh_derived

            receiver, request, model = checked
            receiver.commit(request)
            # SGLang calls this at the end of an update only when nothing was loaded in it.
            post_load_weights(model)
            refresh_derived(model)

        checked = _all_succeed(check, f"{REFUSED}, the weights are as before")
        _all_succeed(commit, "the commit failed, the weights are mixed")
        return _Committed()

    def around_load(self, stock: Stock, updater: Any, named_tensors: Any) -> tuple[bool, str]:
        if isinstance(named_tensors, _Committed):
            return True, "megasync has committed the weights"
        return stock(updater, named_tensors)

    def _answer(self, command: str, payload: Any, rank: ServingRank) -> object:
        if command == "hello":
            return self._hello(rank)
        if command == "trace":
            return self._trace(msgspec.convert(payload, TraceRequest), rank)
        return self._receiver_of(rank).handle(command, payload)

    def _receiver_of(self, rank: ServingRank) -> WeightReceiver:
        if self._receiver is None:
            self._receiver = self._make_receiver(rank)
        return self._receiver

    def _hello(self, rank: ServingRank) -> Hello:
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

    def _trace(self, request: TraceRequest, rank: ServingRank) -> EngineRank:
        from megasync.layout.trace import trace_load

        if request not in self._traces:
            self._traces[request] = trace_load(rank.model, request.specs)
        return self._traces[request]


@dataclass(frozen=True)
class GuardedServer:
    """SGLang's HTTP server with megasync's guard in front of it.

    The keys never become server arguments: SGLang logs those, passes them to its other processes and shows them at
    `/server_info`.
    """

    admin: str
    generation: str | None
    # Of a decode engine.
    prompts: PromptCalls | None = None

    def register(self) -> None:
        if self.prompts is not None:
            self.prompts.register()
        _hook("AROUND", _SERVE, self.around_serve)
        _hook("REPLACE", _ADD_MIDDLEWARE, self.add_guard)

    def around_serve(self, stock: Stock, *arguments: Any, **options: Any) -> Any:
        from sglang.srt.runtime_context import get_serving

        serving = get_serving()
        # The guard would cover neither: HTTP workers import the application again, and gRPC is another server.
        if serving.tokenizer_worker_num != 1 or serving.grpc_port is not None:
            raise ServerError(
                f"a server with keys cannot be guarded with --tokenizer-worker-num={serving.tokenizer_worker_num} and "
                f"--grpc-port={serving.grpc_port}; leave both out of server_args, and SGLANG_GRPC_PORT unset"
            )
        # With an admin key SGLang installs a guard; its own warm-up and garbage collection authenticate with these.
        with serving.override(admin_api_key=self.admin, api_key=self.generation):
            return stock(*arguments, **options)

    def add_guard(self, app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
        if self.prompts is not None:
            app.add_middleware(self.prompts.middleware)
        # Added last, it is in front of all others.
        app.add_middleware(ServerGuard, admin=self.admin, generation=self.generation)


def dequantize_weights(storage: Storage, stock: Stock, *arguments: Any, **options: Any) -> Any:
    """The tensors that SGLang reads from a folder, unquantized; those of a version that was synced pass through."""
    from megasync.layout import block_fp8, mxfp4

    weights = stock(*arguments, **options)
    return mxfp4.dequantized(weights) if storage == mxfp4.MXFP4 else block_fp8.dequantized(weights, storage)


def request_arrays(manager: Any, request: Any, *_: Any, **__: Any) -> None:
    """Turns labels that request routes and supports into SGLang's own fields, before SGLang reads them."""
    labels = dict(getattr(request, "custom_labels", None) or {})
    # What remains becomes labels of SGLang's metrics.
    start, with_support = labels.pop(ROUTES_FROM, ""), labels.pop(WITH_SUPPORT, "")
    if start.isdecimal():
        request.return_routed_experts, request.routed_experts_start_len = True, int(start)
    if with_support == "1":
        request.return_sampling_mask = True
    if start or with_support:
        request.custom_labels = labels or None


class PolicyAdapters:
    """The adapters of the trained policy in a server that has loaded one for each version (`sync.disk.adapters`)."""

    def __init__(self) -> None:
        # Only referenced here, so that they are not collected before they end.
        self._unloading: set[asyncio.Task[Any]] = set()

    def register(self) -> None:
        _hook("BEFORE", _RESOLVE_ADAPTER, self.choose)
        _hook("AROUND", _GENERATE, self.around_generate)
        _hook("AROUND", _SET_VERSION, self.around_set_version)
        _hook("AROUND", _LOAD_ADAPTER, self.around_load)

    def choose(self, manager: Any, request: Any) -> None:
        """Gives a request without an adapter that of the server's version, if there is one."""
        if manager.enable_lora and request.is_single and not request.lora_path:
            request.lora_path = policy_adapter(manager.config_value("weight_version"), _loaded(manager))

    async def around_generate(
        self, stock: Stock, manager: Any, request: Any, *rest: Any, **options: Any
    ) -> AsyncIterator[Any]:
        """Reports the version of a request's adapter, whatever the server's has become since it began."""
        async with aclosing(stock(manager, request, *rest, **options)) as answers:
            async for answer in answers:
                name = request.lora_path
                if isinstance(name, str) and name.startswith((POLICY_ADAPTER, KEPT_ADAPTER)):
                    set_version(answer["meta_info"], _version_of(name))
                yield answer

    async def around_set_version(self, stock: Stock, manager: Any, request: Any) -> None:
        """Switches, and unloads unused adapters; not the last ones, which requests may just have chosen."""
        await stock(manager, request)
        if not manager.enable_lora:
            return
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        loaded = _loaded(manager)
        for name in sorted((name for name in loaded if name.startswith(POLICY_ADAPTER)), key=_age_of)[:-KEPT]:
            # Others go with a later switch: unloading waits for their requests, and loading for the unloading.
            if manager.lora_registry._counters[loaded[name].lora_id].value() == 0:
                task = asyncio.create_task(manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name)))
                self._unloading.add(task)
                task.add_done_callback(self._unloading.discard)

    def around_load(self, stock: Stock, manager: Any, reference: Any) -> Any:
        """Refuses a folder of a version whose bytes are not those of its manifest."""
        if problem := damage(Path(reference.lora_path)):
            return manager.create_lora_update_result(success=False, error_message=problem)
        return stock(manager, reference)


class GroupSockets:
    """Unix sockets for the processes of a server with attention groups, in ``folder``, which is the user's alone.

    SGLang's are TCP ports of loopback, at fixed distances from the HTTP port. They may be in use, and every user of the
    machine could command the scheduler there, past the guard of the HTTP server.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._groups = 0

    def register(self) -> None:
        _hook("AROUND", _PORTS, self.around_ports)
        # A port that nobody opens may be in use.
        _hook("REPLACE", "sglang.srt.server_args.wait_port_available", lambda port, name: True)
        _hook("REPLACE", _CONTROLLER + "get_zmq_socket_on_host", self.open_group)
        # The numbers would go to other nodes, from a port of its own.
        _hook("REPLACE", _CONTROLLER + "DataParallelController._broadcast_worker_ports", lambda _, __, numbers: numbers)

    def around_ports(
        self, stock: Stock, settings: Any, dp_rank: int | None = None, worker_ports: list[int] | None = None
    ) -> Any:
        """The addresses of a server's processes, or of the ranks of one group."""
        ports = stock(settings, dp_rank, worker_ports)
        for name in ("tokenizer", "detokenizer", "rpc", "metrics"):
            setattr(ports, f"{name}_ipc_name", self._address(name))
        ports.scheduler_input_ipc_name = self._address("controller" if dp_rank is None else f"group-{dp_rank}")
        return ports

    def open_group(self, context: Any, kind: Any, **_: object) -> tuple[int, Any]:
        """Opens the sockets of the groups in turn; the number of one, in place of its port, and the socket."""
        from sglang.srt.utils.network import get_zmq_socket

        number, self._groups = self._groups, self._groups + 1
        return number, get_zmq_socket(context, kind, self._address(f"group-{number}"), True)

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"


def policy_adapter(served: str, names: Iterable[str]) -> str | None:
    """The latest adapter of a version among ``names``, or None."""
    own = [name for name in names if name.startswith(POLICY_ADAPTER) and _version_of(name) == served]
    return max(own, key=_age_of, default=None)


def set_version(meta: dict[str, Any], served: str) -> None:
    """Makes an answer's metadata say that one version sampled all its tokens."""
    if "weight_version" in meta:
        meta["weight_version"] = served
    if spans := meta.get("weight_versions"):
        meta["weight_versions"] = [{"version": served, "start": 0, "end": spans[-1]["end"]}]


def damage(folder: Path) -> str:
    """What is wrong with the files of a version, by its manifest; empty if nothing is, or if there is no manifest."""
    if not (folder / MANIFEST).is_file():
        return ""
    for name, written in json.loads((folder / MANIFEST).read_text())["files"].items():
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                return f"{folder / name} has other bytes here than {MANIFEST} says"
    return ""


def _version_of(adapter: str) -> str:
    return adapter.removeprefix(POLICY_ADAPTER).removeprefix(KEPT_ADAPTER).partition(".")[0]


def _age_of(adapter: str) -> tuple[int, int]:
    """Sorts the policy's adapters by version, and those of one version by the number of its publish."""
    served, _, again = adapter.removeprefix(POLICY_ADAPTER).partition(".")
    return int(served), int(again or 0)


def _loaded(manager: Any) -> dict[str, Any]:
    return manager.lora_registry.get_all_adapters()


def meet(url: str, timeout: timedelta, **_: object) -> Iterator[tuple[TCPStore, int, int]]:
    """Torch's rendezvous in the store of a server on several nodes (`SGLangServer.meet`)."""
    from megasync.store import join_store

    parts, query = urlsplit(url), parse_qs(urlsplit(url).query)
    store = join_store(str(parts.hostname), cast(int, parts.port), timeout.total_seconds())
    yield store, int(query["rank"][0]), int(query["world_size"][0])


def register() -> None:
    """The entry point that SGLang calls."""
    Plugin().register()
    _hook("BEFORE", _GENERATE, request_arrays)
    if os.environ.get(PIPELINE_VARIABLE) == "1":
        Pipeline().register()
    if folder := os.environ.get(SOCKETS_VARIABLE):
        GroupSockets(folder).register()
    if os.environ.get(ADAPTERS_VARIABLE) == "1":
        PolicyAdapters().register()
    if stored := os.environ.get(STORAGE_VARIABLE):
        from megasync.layout.block_fp8 import Block

        storage = json.loads(stored)
        storage = Block(*storage) if isinstance(storage, list) else storage
        _hook("AROUND", _WEIGHTS, partial(dequantize_weights, storage))
    if os.environ.get(_INIT_METHOD, "").startswith(f"{STORE_SCHEME}://"):
        from torch.distributed.rendezvous import register_rendezvous_handler

        # A forked process has its parent's handlers.
        with suppress(RuntimeError):
            register_rendezvous_handler(STORE_SCHEME, meet)
    # Only in the HTTP server's own process: the pipe is empty for those that it starts.
    if KEYS_VARIABLE in os.environ and multiprocessing.parent_process() is None:
        keys = json.loads(sys.stdin.buffer.read())
        role = keys.pop("role", None)
        if role is not None:
            # Those inherit it.
            os.environ[HANDOVER_VARIABLE] = keys.pop("handover")
        GuardedServer(**keys, prompts=PromptCalls(keys["admin"]) if role == "decode" else None).register()
    if handover := os.environ.get(HANDOVER_VARIABLE):
        Handover(handover, os.environ.get("SGLANG_USE_CPU_ENGINE") == "1").register()
    if os.environ.get(CLASSIFIER_VARIABLE) == "1" and SCORE_BIAS.needed():
        SCORE_BIAS.apply()


def _hook(kind: str, target: str, hook: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType[kind])


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _check_update_supported(updater: Any) -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error

    updater._assert_weight_cache_inactive("a megasync commit")
    refusal = _unsupported_derived_weight_cache_error(updater.get_model())
    if refusal is not None:
        raise ServerError(refusal)


def _all_succeed(step: Callable[[], T], outcome: str) -> T:
    """Takes a step on each rank of the server. When it fails on any, all ranks raise the errors of all of them."""
    failure, result = "", None
    try:
        result = step()
    except Exception as error:
        log.exception("A weight update failed")
        failure = f"{type(error).__name__}: {error}"
    parallel = _parallel()
    group = parallel.world_group if parallel.pp_size > 1 else parallel.tp_group
    failures = [text.decode() for text in gather(failure.encode(), group.cpu_group)]
    if any(failures):
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        raise ServerError(f"{outcome}: {reasons}")
    return cast(T, result)
