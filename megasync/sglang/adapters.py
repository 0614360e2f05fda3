"""The policy's adapters inside SGLang: a request uses that of its server's version (`sync.disk.adapters`)."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from megasync.serving.plugin_protocol import KEPT_ADAPTER, MANIFEST, POLICY_ADAPTER
from megasync.sglang.hooks import Stock, hook

_GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
_RESOLVE_ADAPTER = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_and_resolve_lora"
_SET_VERSION = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weight_version"
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
    """The damage of a version's files by its manifest; empty if there is none, or no manifest."""
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
