"""Servers that somebody else has started for a run: asked whether they fit it, never started and never ended.

Whoever starts them chooses their options; what a run relies on is asked for before it begins and after each loss. The
first version that is published brings them the trainer's weights, whatever they held.

Whoever starts them may also replace one behind its URL, between two probes. `ended` tells the new process from the old
one, and `rollout.client` refuses its answers until then: they are of a version older than every server holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.config.access import EXTERNAL_KEY_VARIABLE, given_external_key
from megasync.config.server_args import FLOAT32_HEAD
from megasync.errors import ConfigError, HttpStatusError, ServerError, raised_as
from megasync.layout.model_files import read_hf_config
from megasync.serving.cache_size import RESERVED_TOKENS
from megasync.serving.control import ServerControl

# Seconds for one answer, and between two attempts to reach a server that was lost, or two looks at its identity.
ANSWER_SECONDS = 15.0
POLL_SECONDS = 2.0


class ExternalServer:
    """One such server, in the place of a process of the run (`server_slot.ServerProcess`)."""

    def __init__(self, url: str, config: Config, key: str) -> None:
        self._url = url.rstrip("/")
        self._config = config
        self._key = key
        self._process: ProcessSeen | None = None
        self._replaced = False

    async def start(self, timeout: float) -> str:
        """Waits until the server answers and fits the run; returns its URL.

        Raises ServerError, with the last reason, after `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            try:
                self._process = await check_external_server(self._url, self._config, self._key)
                self._replaced = False
                return self._url
            except ServerError as error:
                if loop.time() + POLL_SECONDS > deadline:
                    raise ServerError(f"{error}; waited {timeout:g} s (timeouts.server_start)") from error
            await asyncio.sleep(POLL_SECONDS)

    async def ended(self) -> None:
        """Returns when another process answers at the URL. Unanswered calls show that the server is gone."""
        async with ServerControl(self._url, self._key or given_external_key()) as control:
            while not self._replaced:
                await asyncio.sleep(POLL_SECONDS)
                with suppress(ServerError):
                    seen = await _look(control)
                    self._replaced = self._process is not None and not seen.may_follow(self._process)
                    self._process = seen

    def processes(self) -> list[tuple[str, int]]:
        """None of this run."""
        return []

    async def tail(self, lines: int) -> str:
        return f"({'another process answers at its URL; ' * self._replaced}its log is with whoever has started it)"

    async def visible_devices(self) -> str:
        raise ServerError(f"{self._url} is an external server; its devices are not known here")

    async def stop(self, timeout: float) -> None:
        """Leaves the server running: it belongs to the one who started it."""


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """The identity of a server's process: `/server_info` and `/model_info` as it has answered them."""

    info: Mapping[str, Any]
    model: Mapping[str, Any]

    def may_follow(self, earlier: ProcessSeen) -> bool:
        """Whether the same process may have answered both: its start took as long, and what was synced still is.

        A version may go down: the server may have served another run before this one.
        """
        lost = earlier.synced and not self.synced
        return self.info.get("startup_time") == earlier.info.get("startup_time") and not lost

    @property
    def synced(self) -> bool:
        """Whether it reports the version of a sync, which is 1 or higher."""
        text = str(self.model.get("weight_version"))
        return text.isascii() and text.isdigit() and int(text) > 0


async def _look(control: ServerControl) -> ProcessSeen:
    info = await control.get("/server_info", ANSWER_SECONDS)
    model = await control.get("/model_info", ANSWER_SECONDS)
    if not isinstance(info, dict) or not isinstance(model, dict):
        raise ServerError(f"{control.url} is no SGLang server: /server_info and /model_info do not answer with objects")
    return ProcessSeen(info, model)


async def check_external_servers(config: Config) -> None:
    """Raises ConfigError, with the first reason, unless all servers of `rollout.external` answer and fit the run."""
    with raised_as(ConfigError, "rollout.external", of=ServerError):
        await gather_or_cancel(*(check_external_server(url, config) for url in config.rollout.external))


async def check_external_server(url: str, config: Config, key: str | None = None) -> ProcessSeen:
    """The process that answers. Raises ServerError unless the server answers and fits the run."""
    try:
        async with ServerControl(url, key or given_external_key()) as control:
            seen = await _look(control)
    except HttpStatusError as error:
        if error.status in (401, 403):
            raise ServerError(f"{url} refuses the key in {EXTERNAL_KEY_VARIABLE}, or needs one") from error
        raise ServerError(f"{url} is no SGLang server that can be used: {error}") from error
    if problem := next(misfits(seen.info, seen.model, config), None):
        raise ServerError(f"{url} {problem}")
    return seen


def misfits(info: Mapping[str, Any], model: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Why a server does not fit the run, from its `/server_info` and `/model_info`, each with the fix."""
    rollout, installed = config.rollout, version("sglang")
    if info.get("version") != installed:
        yield f"runs SGLang {info.get('version')}, but this run needs {installed}; install that version there"
    kind = read_hf_config(config.model.path).get("model_type")
    if model.get("model_type") != kind:
        yield (
            f"serves a model of type {model.get('model_type')} ({model.get('model_path')}), but model.path="
            f"{config.model.path} is of type {kind}; start it with a copy of that folder"
        )
    if info.get("dtype") not in (config.model.dtype, "auto"):
        yield (
            f"computes in {info.get('dtype')}, but model.dtype={config.model.dtype}; start it with --dtype "
            f"{config.model.dtype}"
        )
    if info.get("tp_size") != rollout.tensor_parallel:
        yield f"has {info.get('tp_size')} tensor-parallel ranks, but rollout.tensor_parallel={rollout.tensor_parallel}"
    if info.get("ep_size") != rollout.expert_parallel:
        yield f"has {info.get('ep_size')} expert-parallel ranks, but rollout.expert_parallel={rollout.expert_parallel}"
    for name in ("pp_size", "dp_size", "attn_dp_size"):
        if (size := info.get(name)) != 1:
            option = f"--{name.replace('_', '-')}"
            yield f"runs with {option} {size}, which weight syncs do not support; start it with {option} 1"
    if (role := info.get("disaggregation_mode")) != "null":
        yield f"runs with --disaggregation-mode {role}, which weight syncs do not support; start it without that flag"
    if rollout.stream_interval and not info.get("incremental_streaming_output"):
        yield (
            f"streams whole responses; start it with --incremental-streaming-output --stream-interval "
            f"{rollout.stream_interval}, or set rollout.stream_interval=0"
        )
    if rollout.routing_replay and not info.get("enable_return_routed_experts"):
        yield ("reports no routes; start it with --enable-return-routed-experts, or set rollout.routing_replay=false")
    in_float32 = config.trainer.float32_head
    if config.model.dtype != "float32" and bool(info.get("enable_fp32_lm_head")) != in_float32:
        yield (
            f"computes logits in {config.model.dtype if in_float32 else 'float32'}, but trainer.float32_head="
            f"{str(in_float32).lower()}; start it {'with' if in_float32 else 'without'} {FLOAT32_HEAD}"
        )
    if rollout.deterministic and not info.get("enable_deterministic_inference"):
        yield "does not compute deterministically; start it with --enable-deterministic-inference"
    longest = config.data.prompt.max_tokens + rollout.sampling.max_new_tokens
    room = info.get("context_length")
    needed = longest + RESERVED_TOKENS
    if isinstance(room, int) and room < needed:
        yield (
            f"accepts {room} tokens, of which it reserves {RESERVED_TOKENS}, but a sequence may have {longest}; start "
            f"it with --context-length {needed}"
        )
