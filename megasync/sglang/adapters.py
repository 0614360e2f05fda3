"""Adapters inside SGLang: those of the policy, of which a request uses its server's version, and those with a name.

The policy's are loaded by the driver (`sync.disk.adapters`). A server with a root of adapters loads any other when a
request names it, from the folder of that name: a server that starts again, joins late or has unloaded an adapter needs
nothing from the driver, and any server can answer any request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from megasync.serving.plugin_protocol import ADAPTER, ADAPTER_NAME, KEPT_ADAPTER, MANIFEST, POLICY_ADAPTER
from megasync.sglang.hooks import Stock, hook

log = logging.getLogger(__name__)

_GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
_RESOLVE_ADAPTER = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_and_resolve_lora"
_SET_VERSION = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weight_version"
_DRAIN = "sglang.srt.lora.lora_drainer.LoRADrainer.update_draining_state"
_LOAD_ADAPTER = "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter"

# The policy's adapters that stay loaded whether requests use them or not.
KEPT = 2


class PolicyAdapters:
    """The adapters of the trained policy in a server that has loaded one for each version (`sync.disk.adapters`)."""

    def __init__(self) -> None:
        # Only referenced here, so that they are not collected before they end.
        self._unloading: set[asyncio.Task[Any]] = set()

    def register(self) -> None:
        hook("BEFORE", _RESOLVE_ADAPTER, self.choose)
        hook("AROUND", _GENERATE, self.around_generate)
        hook("AROUND", _SET_VERSION, self.around_set_version)
        hook("AROUND", _LOAD_ADAPTER, self.around_load)

    def choose(self, manager: Any, request: Any) -> None:
        """Gives a request without an adapter that of the server's version, if there is one."""
        if manager.enable_lora and not request.lora_path:
            name = policy_adapter(manager.config_value("weight_version"), _loaded(manager))
            request.lora_path = name if name is None or request.is_single else [name] * request.batch_size

    async def around_generate(
        self, stock: Stock, manager: Any, request: Any, *rest: Any, **options: Any
    ) -> AsyncIterator[Any]:
        """Reports a request's adapter, and its version, whatever the server's has become since it began."""
        try:
            async with aclosing(stock(manager, request, *rest, **options)) as answers:
                async for answer in answers:
                    # A request for several responses has one answer for all, or pieces with numbers.
                    several = isinstance(answer, list)
                    for index, each in enumerate(answer if several else [answer]):
                        _label(each["meta_info"], request.lora_path, index if several else each.get("index", 0))
                    yield answer
        except AdapterUnavailable as problem:
            log.warning("A request waits for an adapter: %s", problem)
            # Not as the status of the answer: the router would take a server for broken that lacks a file.
            finish = {"type": "abort", "status_code": 503, "message": str(problem)}
            yield {"text": "", "output_ids": [], "meta_info": {"id": request.rid, "finish_reason": finish}}

    async def around_set_version(self, stock: Stock, manager: Any, request: Any) -> None:
        """Switches, and unloads unused adapters; not the last ones, which requests may just have chosen."""
        await stock(manager, request)
        if not manager.enable_lora:
            return
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        loaded = _loaded(manager)
        for name in sorted((name for name in loaded if name.startswith(POLICY_ADAPTER)), key=_age_of)[:-KEPT]:
            # Others go with a later switch: unloading waits for their requests, and loading for the unloading.
            if not _users(manager, loaded[name]):
                task = asyncio.create_task(manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name)))
                self._unloading.add(task)
                task.add_done_callback(self._unloading.discard)

    def around_load(self, stock: Stock, manager: Any, reference: Any) -> Any:
        """Refuses a folder of a version whose bytes are not those of its manifest."""
        if problem := damage(Path(reference.lora_path)):
            return manager.create_lora_update_result(success=False, error_message=problem)
        return stock(manager, reference)


def _label(meta: dict[str, Any], adapters: Any, index: int) -> None:
    """Says in an answer's metadata which adapter sampled it, of the one, or the list of them, of its request."""
    name = adapters[index] if isinstance(adapters, list) else adapters
    if isinstance(name, str):
        meta[ADAPTER] = name
        if name.startswith((POLICY_ADAPTER, KEPT_ADAPTER)):
            set_version(meta, _version_of(name))


class AdapterUnavailable(Exception):
    """An adapter that a request names cannot be loaded here and now."""


class NamedAdapters:
    """The adapters in the folders of ``root``, each loaded when a request names it.

    An adapter that a request uses stays loaded, and one that is asked for by several requests is loaded once. Names
    never repeat, so a loaded adapter is never out of date.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loading: dict[str, asyncio.Task[None]] = {}

    def register(self) -> None:
        hook("AROUND", _RESOLVE_ADAPTER, self.around_resolve)
        hook("AROUND", _DRAIN, self.around_drain)

    def around_drain(self, stock: Stock, drainer: Any, waiting: Any, running: Any) -> None:
        """Forgets adapters without requests. SGLang looks at all that it ever had, at each prefill."""
        stock(drainer, waiting, running)
        known = drainer.adapter_to_stats
        for name, each in list(known.items()):
            if not (each.num_waiting_reqs or each.max_remaining_tokens or each.is_draining_for):
                del known[name]

    async def around_resolve(self, stock: Stock, manager: Any, request: Any) -> None:
        """Loads the adapter of a request before SGLang looks it up and counts the request as its user.

        Raises AdapterUnavailable.
        """
        names = request.lora_path if isinstance(request.lora_path, list) else [request.lora_path]
        named = {name for name in names if isinstance(name, str) and ADAPTER_NAME.fullmatch(name)}
        while True:
            for name in named.difference(_loaded(manager)):
                await self._load(manager, name)
            try:
                await stock(manager, request)
            except ValueError:
                # Unless others needed its place in the meantime.
                if named.issubset(_loaded(manager)):
                    raise
            else:
                return

    async def _load(self, manager: Any, name: str) -> None:
        if (task := self._loading.get(name)) is None:
            task = self._loading[name] = asyncio.create_task(self._read(manager, name))
            task.add_done_callback(lambda _: self._loading.pop(name))
        # A request that is given up does not take the adapter from the others.
        await asyncio.shield(task)

    async def _read(self, manager: Any, name: str) -> None:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

        folder = self._root / name
        if not folder.is_dir():
            raise AdapterUnavailable(f"adapter {name}: {folder} is no folder on this server")
        await _make_room(manager)
        result = await manager.load_lora_adapter(LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(folder)))
        if not result.success:
            if name in manager.pending_lora_unloads:
                # Some ranks have it.
                await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
            raise AdapterUnavailable(f"adapter {name}: {result.error_message}")


async def _make_room(manager: Any) -> None:
    """Unloads the adapter that was used longest ago, if the server is full.

    SGLang does it after a load, and then waits for the requests of that adapter, while nothing can be loaded.
    """
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput
    from sglang.srt.runtime_context import get_lora

    loaded, most = _loaded(manager), get_lora().max_loaded_loras
    if most is None or len(loaded) < most:
        return
    # In the order of their last use.
    idle = (name for name, reference in loaded.items() if not reference.pinned and not _users(manager, reference))
    if (name := next(idle, None)) is not None:
        await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))


def policy_adapter(served: str, names: Iterable[str]) -> str | None:
    """The latest adapter of a version among ``names``, or None."""
    candidates = [name for name in names if name.startswith(POLICY_ADAPTER) and _version_of(name) == served]
    return max(candidates, key=_age_of, default=None)


def set_version(meta: dict[str, Any], served: str) -> None:
    """Makes an answer's metadata say that one version sampled all its tokens."""
    if "weight_version" in meta:
        meta["weight_version"] = served
    if spans := meta.get("weight_versions"):
        meta["weight_versions"] = [{"version": served, "start": 0, "end": spans[-1]["end"]}]


def damage(folder: Path) -> str:
    """The damage of an adapter's files by its manifest; empty if there is none, or no manifest."""
    if not (folder / MANIFEST).is_file():
        return ""
    try:
        for name, written in json.loads((folder / MANIFEST).read_text())["files"].items():
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                    return f"{folder / name} has other bytes here than {MANIFEST} says"
    except OSError as error:
        # It may be withdrawn at this moment. An error would end the server.
        return f"{folder} cannot be read here: {error}"
    return ""


def _version_of(adapter: str) -> str:
    return adapter.removeprefix(POLICY_ADAPTER).removeprefix(KEPT_ADAPTER).partition(".")[0]


def _age_of(adapter: str) -> tuple[int, int]:
    """Sorts the policy's adapters by version, and those of one version by the number of its publish."""
    served, _, again = adapter.removeprefix(POLICY_ADAPTER).partition(".")
    return int(served), int(again or 0)


def _loaded(manager: Any) -> dict[str, Any]:
    return manager.lora_registry.get_all_adapters()


def _users(manager: Any, reference: Any) -> int:
    """The number of requests that use a loaded adapter."""
    return manager.lora_registry._counters[reference.lora_id].value()
