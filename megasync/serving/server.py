"""SGLang servers, for the rollout and for frozen models: their command line, environment and life.

A server starts with weight version 0 and reports the version of every token it samples. It listens on `host` only.
With an admin key, every route is closed that `sglang.guard` does not open. The server reads its keys from a pipe, and
its start succeeds only after it has refused a call without a key (`_check_guard`).

The server keeps its tokenizer although requests are token ids in and out: leaving it out (`--skip-tokenizer-init`)
saves 0.03 ms of 1.6 ms CPU per request, and stop strings need it.

A folder in block FP8 or MXFP4 is served unquantized in the policy's dtype, as the trainer holds it: `sglang.plugin`
dequantizes the tensors that SGLang reads. With `rollout.fp8` a folder in block FP8 is served as it is stored, as frozen
models always are.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from megasync.base.files import home, socket_folder
from megasync.config import SERVICE_FOLDER
from megasync.config.host import is_loopback, resolve_host, without_proxies
from megasync.config.pools import engine_devices
from megasync.config.schema import Config, FrozenModelConfig, RewardModelConfig, RolloutConfig
from megasync.config.server_args import OVERRIDES
from megasync.device import compiler_environment
from megasync.errors import ConfigError, HttpStatusError, ServerError
from megasync.layout.adapter import adapter_layout, kinds_of_projections
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config, read_storage
from megasync.layout.storage import Storage
from megasync.layout.topology import Topology
from megasync.serving.cache_size import RESERVED_TOKENS, bytes_per_token, cpu_cache_tokens
from megasync.serving.control import ServerControl
from megasync.serving.plugin_protocol import (
    ADAPTER_ROOT,
    ADAPTER_ROOT_VARIABLE,
    ADAPTERS_IN_BATCH,
    ADAPTERS_LOADED,
    ADAPTERS_VARIABLE,
    CLASSIFIER_VARIABLE,
    CLOSED_ROUTE,
    EVAL_ADAPTER,
    HOST_VARIABLE,
    KEYS_VARIABLE,
    PIPELINE_VARIABLE,
    PREFILL_ROUTE,
    RANKS_VARIABLE,
    SOCKETS_VARIABLE,
    STORAGE_VARIABLE,
    STORE_SCHEME,
)
from megasync.serving.process import Service, free_port

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# Used unless the environment names another package.
MODEL_PACKAGE = "megasync.sglang.models"

# What the stand-in folder provides; each is used only when the real package is missing.
_STAND_INS = ("triton", "torchvision", "sgl_kernel")
_UNQUANTIZED = {"quantization_config": None}

_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # More threads make small models slower, and an idle thread pool spins. Ray sets it to 1 unless the user has set it.
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "MKL_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    # A plain install has no compiler on the path.
    "TORCHDYNAMO_DISABLE": "1",
}

_ENVIRONMENT = {
    # The health probe would otherwise be a generation, which hangs while the server is paused for a weight sync.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # The model is a local folder: nothing is looked up on the network.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # Returns parsed calls of unknown tools instead of dropping them, so that the model can be told.
    "SGLANG_FORWARD_UNKNOWN_TOOLS": "1",
    # Seconds between two checks whether the caller of a request is still connected.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
    # Its limit may exceed that of the model by `RESERVED_TOKENS`. Positions of requests do not.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # Log-probs are those of the distribution that is sampled from, its temperature included.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
}

# The order of waiting requests: those with the lowest `priority` number first, before all of them those without one.
# Running requests go on, because their tokens would have to be computed again.
_PRIORITY_ARGUMENTS: dict[str, object] = {
    "--enable-priority-scheduling": True,
    "--schedule-low-priority-values-first": True,
    "--disable-priority-preemption": True,
    "--default-priority-value": 0,
}
# Seconds that the requests of an adapter wait while others take up all places of a batch, until one of these gets no
# new requests any more. Otherwise steady requests of some would keep the others out for ever.
_ADAPTER_WAIT = 5.0
# SGLang refuses priorities with other policies.
_PRIORITY_POLICIES = ("fcfs", "lof")
_CPU_ARGUMENTS: dict[str, object] = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--cuda-graph-backend-decode": "disabled",
    "--cuda-graph-backend-prefill": "disabled",
    # An idle scheduler otherwise spins on a whole core.
    "--sleep-on-idle": True,
    # The warm-up generation is for kernels that are compiled on first use.
    "--skip-server-warmup": True,
}


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """Adapters that a server serves beside its model: their rank, their projections, and how many in one batch.

    ``loaded`` are those that it has from its start, as name and PEFT folder. With a ``root``, a request may name any
    other adapter whose PEFT folder has that name in the root: the server loads it then. Beyond ``most_loaded`` it
    unloads those that were used longest ago and that no request uses.
    """

    rank: int
    targets: tuple[str, ...]
    most: int
    loaded: tuple[tuple[str, str], ...] = ()
    root: Path | None = None
    most_loaded: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRole:
    """The role of one engine in a server of several.

    ``kind`` is "prefill" or "decode", and ``first`` the number of its first rank among the ``ranks`` of the server.
    Engines with one ``key`` hand prompts over to one another.
    """

    kind: str
    first: int
    ranks: int
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The model that a server serves and how, independent of where it listens."""

    # A Hugging Face folder with a config.json.
    model_path: str | Path
    rollout: RolloutConfig
    # float32 or bfloat16.
    dtype: str
    # cpu or cuda.
    device: str
    seed: int = 0
    # Each request samples from its own seed, whatever else is in the batch.
    deterministic: bool = False
    # Nodes that share its ranks evenly, with a process on each.
    nodes: int = 1
    # In the format of CUDA_VISIBLE_DEVICES, GPUs that other processes use too; empty where it has devices of its own.
    gpus: str = ""
    # Whether it can free its device memory and get it back: `server_slot.ServerSlot.release_memory`.
    releases_memory: bool = False
    # Whether it has metrics of its own, which Prometheus can scrape.
    metrics: bool = False
    adapters: ServedAdapters | None = None
    # Tokens of the longest sequence, for which the cache of a server on a CPU has room at least.
    longest: int = 0
    # Whether it scores texts at `/classify` instead of generating.
    classifier: bool = False


class SGLangServer(Service):
    """One SGLang server. The constructor only stores settings; `start` opens everything.

    Args:
        api_key: the admin key. Without one every route is open, which suits tests and benchmarks.
        generation_key: with it, generation requires this key or the admin key.
        node: of several nodes, the number of this one. Only the process on node 0 answers requests.
        meeting_point: on other nodes, what `meet` returned on node 0.
        role: of an engine in a server of several, which needs an admin key.
    """

    name = "SGLang server"

    def __init__(
        self,
        spec: ServerSpec,
        host: str,
        port: int,
        log_path: str | Path,
        api_key: str | None = None,
        generation_key: str | None = None,
        node: int = 0,
        meeting_point: tuple[str, int] | None = None,
        role: EngineRole | None = None,
    ) -> None:
        super().__init__(host, port, log_path)
        if role is not None and api_key is None:
            raise ServerError("an engine of a server with several needs an admin key, and has none")
        self._role = role
        self._handover_port = 0
        self._node = node
        self._meeting_point = meeting_point
        self._store: TCPStore | None = None
        self.spec = spec
        self.model_path = Path(spec.model_path)
        self.api_key = api_key
        self.generation_key = generation_key
        self._folder: str | None = None

    def arguments(self) -> dict[str, object]:
        """Command line options; True stands for a flag, a tuple for several values, and None and False for nothing.

        The configuration's `server_args` override all others.
        """
        spec, rollout = self.spec, self.spec.rollout
        options: dict[str, object] = {
            "--model-path": str(self.model_path),
            "--host": self.host,
            "--port": self.port,
            "--dtype": spec.dtype,
            "--tp-size": rollout.tensor_parallel,
            "--pp-size": rollout.pipeline_parallel,
            "--mem-fraction-static": rollout.mem_fraction,
            "--weight-version": 0,
            # Never a pickled checkpoint, which may hold code.
            "--load-format": "safetensors",
            "--random-seed": spec.seed,
            # Higher levels log one line per request and batch.
            "--log-level": "warning",
            "--context-length": self._context(),
            "--max-total-tokens": self._cache(),
            "--max-running-requests": rollout.max_running_requests,
            "--ep-size": rollout.expert_parallel if rollout.expert_parallel > 1 else None,
            "--attn-dp-size": rollout.attention_data_parallel if rollout.attention_data_parallel > 1 else None,
            "--enable-return-routed-experts": rollout.routing_replay,
            "--enable-metrics": spec.metrics,
            "--is-embedding": spec.classifier,
            "--enable-deterministic-inference": spec.deterministic,
        }
        if spec.nodes > 1:
            options |= {"--nnodes": spec.nodes, "--node-rank": self._node, "--dist-init-addr": self._meeting_address()}
        if self._role is not None:
            options |= {"--disaggregation-mode": self._role.kind, "--disaggregation-transfer-backend": "nixl"}
            if self._role.kind == "prefill":
                options["--disaggregation-bootstrap-port"] = self._handover_port
            elif spec.device == "cpu":
                # By default a second cache for requests that give up their place, which needs 10 GiB of free memory.
                options["--disaggregation-decode-retraction-backup"] = "cpu_tensor"
        if rollout.server_args.get("--schedule-policy", "fcfs") in _PRIORITY_POLICIES:
            options |= _PRIORITY_ARGUMENTS
        if rollout.stream_interval:
            # Each chunk holds only new tokens; repeating all of them would be quadratic in the response's length.
            options |= {"--stream-interval": rollout.stream_interval, "--incremental-streaming-output": True}
        if spec.releases_memory and spec.device == "cuda":
            # With a copy of the weights on the host: a server that has its memory back holds what it held before.
            options |= {"--enable-memory-saver": True, "--enable-weights-cpu-backup": True}
        if spec.adapters is not None:
            options |= {
                "--enable-lora": True,
                "--max-lora-rank": spec.adapters.rank,
                "--lora-target-modules": spec.adapters.targets,
                # Requests without an adapter count as one.
                "--max-loras-per-batch": spec.adapters.most + 1,
            }
            if spec.adapters.root is not None:
                options["--lora-drain-wait-threshold"] = _ADAPTER_WAIT
            if spec.adapters.most_loaded is not None:
                options["--max-loaded-loras"] = max(spec.adapters.most_loaded, spec.adapters.most + 1)
            if spec.adapters.loaded:
                options["--lora-paths"] = tuple(f"{name}={path}" for name, path in spec.adapters.loaded)
        if spec.device == "cpu":
            options |= _CPU_ARGUMENTS
            if spec.adapters is not None:
                options["--lora-backend"] = "torch_native"
        options |= rollout.server_args
        if self._dequantized() is not None:
            options[OVERRIDES] = json.dumps(json.loads(str(options.get(OVERRIDES, "{}"))) | _UNQUANTIZED)
            # On Blackwell, SGLang otherwise decides by what the files hold, not by the configuration.
            options["--quantization"] = "unquant"
        return options

    def meet(self, timeout: float) -> tuple[str, int]:
        """Opens the store in which the processes of all nodes meet, on node 0; its address.

        The one that SGLang would open listens on all interfaces. Call it before `start`.
        """
        from megasync.base.store import open_store

        host = resolve_host(self.host)
        self._store = open_store(host, timeout)
        self._meeting_point = host, self._store.port
        return self._meeting_point

    def _meeting_address(self) -> str:
        if self._meeting_point is None:
            raise ServerError("a server on several nodes needs a meeting point; call `meet` on the first one")
        host, port = self._meeting_point
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _context(self) -> int | None:
        """Tokens of the longest prompt and response, with those that SGLang reserves; None leaves them to SGLang."""
        context = self.spec.rollout.context_length
        if context is None and (self.model_path / "config.json").is_file():
            with suppress(ConfigError):  # SGLang says what it lacks
                context = read_hf_config(self.model_path).get("max_position_embeddings")
        return context and context + RESERVED_TOKENS

    def _cache(self) -> int | None:
        """Tokens of the cache; None leaves them to SGLang."""
        if (tokens := self.spec.rollout.max_total_tokens or self._cpu_cache()) is None:
            return None
        return tokens + RESERVED_TOKENS

    def _cpu_cache(self) -> int | None:
        """Tokens of the cache on a CPU, if the configuration leaves that open."""
        spec = self.spec
        if spec.device != "cpu" or not (self.model_path / "config.json").is_file():
            return None
        try:
            per_token = bytes_per_token(read_hf_config(self.model_path), spec.rollout, spec.dtype)
        except (ConfigError, KeyError):  # SGLang says what it lacks
            return None
        return cpu_cache_tokens(per_token, spec.longest)

    def _dequantized(self) -> Storage | None:
        """The storage of a folder whose weights are dequantized as the server reads them."""
        if self.spec.rollout.fp8:
            return None
        return read_storage(self.model_path) if (self.model_path / "config.json").is_file() else None

    def command(self) -> list[str]:
        launcher = "megasync_patches.sglang_cpu_launch" if self.spec.device == "cpu" else "sglang.launch_server"
        command = [sys.executable, "-m", launcher]
        for name, value in self.arguments().items():
            if value is True:
                command.append(name)
            elif isinstance(value, tuple):
                command += [name, *map(str, cast("tuple[object, ...]", value))]
            elif value is not False and value is not None:
                command += [name, str(value)]
        return command

    def environment(self) -> dict[str, str]:
        env = {"SGLANG_EXTERNAL_MODEL_PACKAGE": MODEL_PACKAGE} | without_proxies(os.environ) | _ENVIRONMENT
        for inherited in (KEYS_VARIABLE, ADAPTER_ROOT_VARIABLE):
            env.pop(inherited, None)
        if self.api_key is not None:
            env[KEYS_VARIABLE] = "stdin"
        if self._folder is not None:
            # SGLang leaves sockets and empty files in the temporary folder, and a file in /dev/shm.
            env["TMPDIR"] = self._folder
            env["MEGASYNC_INSTANCE"] = Path(self._folder).name
            if self.spec.rollout.attention_data_parallel > 1:
                env[SOCKETS_VARIABLE] = self._folder
        if self.spec.nodes > 1:
            env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"{STORE_SCHEME}://{self._meeting_address()}"
            env[HOST_VARIABLE] = self.host
        if self._role is not None:
            env[RANKS_VARIABLE] = f"{self._role.first}/{self._role.ranks}"
            # Where it listens for other engines, and for the trainer.
            env["SGLANG_HOST_IP"] = env[HOST_VARIABLE] = self.host
            # UCX, which moves the cache, listens on all interfaces unless told otherwise.
            within = self.spec.device == "cpu" or is_loopback(self.host)
            if within and (interface := _interface_of(self.host)):
                env.setdefault("UCX_NET_DEVICES", interface)
        switches = {
            PIPELINE_VARIABLE: self.spec.rollout.pipeline_parallel > 1,
            ADAPTERS_VARIABLE: self.spec.adapters is not None,
            CLASSIFIER_VARIABLE: self.spec.classifier,
        }
        env |= {variable: "1" for variable, on in switches.items() if on}
        if (adapters := self.spec.adapters) is not None and adapters.root is not None:
            env[ADAPTER_ROOT_VARIABLE] = str(adapters.root.resolve())
        if (storage := self._dequantized()) is not None:
            env[STORAGE_VARIABLE] = json.dumps(storage)
        if self.spec.device != "cpu":
            # The default is the temporary folder, which is removed: every start would compile again.
            env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home() / ".cache" / "torchinductor"))
            if self.spec.gpus:
                env["CUDA_VISIBLE_DEVICES"] = self.spec.gpus
            return env | compiler_environment(env)
        env |= _CPU_ENVIRONMENT
        if self._role is not None:
            # It asks for a CUDA event.
            env["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"
        if self._folder is not None:
            env["HOME"] = env["XDG_CACHE_HOME"] = self._folder
            # A rendezvous file instead of a TCP store, which would listen on all interfaces.
            env.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{self._folder}/rendezvous")
        if (ranks := engine_devices(self.spec.rollout)) > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores(ranks))
        if any(find_spec(name) is None for name in _STAND_INS):
            path = [stand_ins_path(), *filter(None, [env.get("PYTHONPATH")])]
            env["PYTHONPATH"] = os.pathsep.join(path)
        return env

    def secrets(self) -> bytes | None:
        if self.api_key is None:
            return None
        keys = {"admin": self.api_key, "generation": self.generation_key}
        if self._role is not None:
            keys |= {"role": self._role.kind, "handover": self._role.key}
        return json.dumps(keys).encode()

    def prepare(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="megasync-sglang-", dir=socket_folder())
        if self._role is not None and self._role.kind == "prefill":
            self._handover_port = free_port(self.host)

    def handover_port(self) -> int:
        """Where a prefill engine arranges handovers; known once it has started."""
        return self._handover_port

    async def know_prefill(self, engines: Sequence[tuple[str, int]]) -> None:
        """Tells a decode engine where the prefill engines of its server answer, and their `handover_port`s.

        Raises ServerError.
        """
        async with ServerControl(self.url, self.api_key) as control:
            await control.post(PREFILL_ROUTE, {"engines": engines}, timeout=30.0)

    def visible_devices(self) -> str:
        """The GPUs assigned to this process, in the format of CUDA_VISIBLE_DEVICES; empty for all, or on a CPU."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def scratch(self) -> list[str]:
        return [self._folder, f"/dev/shm/sglang_loads_{Path(self._folder).name}_*"] if self._folder else []

    async def start(self, timeout: float) -> str:
        """Like `Service.start`; returns the URL. Also raises ServerError for a model folder without config.json."""
        if not (self.model_path / "config.json").is_file():
            raise ServerError(f"cannot serve {self.model_path}: the folder has no config.json")
        try:
            url = await super().start(timeout)
            if self._node == 0:
                if self.api_key is not None:
                    await self._check_guard()
                await self._check_version()
            return url
        except BaseException:
            await self.stop(timeout=1.0)
            if self._folder is not None:
                # The supervisor removes it too, but only if it was started.
                shutil.rmtree(self._folder, ignore_errors=True)
            raise

    async def stop(self, timeout: float = 10.0) -> None:
        if self.spec.device == "cpu":
            # SGLang's own shutdown polls every 5 s for work to drain, and a CPU server has no device memory to release.
            self.kill()
        await super().stop(timeout)

    async def ready(self) -> bool:
        # /health answers 503 until the warm-up is over, if there is one.
        try:
            async with ServerControl(self.url) as control:
                await control.get("/health", timeout=5.0)
        except ServerError:
            return False
        return self.alive()

    async def _check_version(self) -> None:
        async with ServerControl(self.url, self.api_key) as control:
            version = await control.weight_version(timeout=30.0)
            if version != 0:
                raise ServerError(f"{self.url} started with weight version {version} instead of 0")
            # Keeps the garbage collector from scanning everything that was imported.
            await control.post("/freeze_gc", timeout=30.0)

    async def _check_guard(self) -> None:
        """Raises ServerError when the server answers a call without the key."""
        try:
            async with ServerControl(self.url) as anonymous:
                await anonymous.get(CLOSED_ROUTE, timeout=30.0)
        except HttpStatusError as refused:
            if refused.status == 401:
                return
        raise ServerError(
            f"{self.url} answers calls without its key, so megasync's plugin does not guard it; if SGLANG_PLUGINS is "
            f"set, add megasync to it, and remove from server_args whatever replaces SGLang's HTTP server"
        )


def served_adapters(config: Config, run_dir: Path = Path()) -> ServedAdapters | None:
    """The adapters of a run or a service as its servers need to know them; None if they get merged weights.

    In one batch of a run: the current version, those of requests that began up to `max_staleness` before, the one that
    an exact evaluation keeps, and those of held-out sets.
    """
    if config.sync.transport != "adapters":
        return None
    base = Layout(read_hf_config(config.model.path), Topology.from_config(config.trainer))
    if config.serve is not None:
        # Each model has some of them.
        targets = tuple(sorted(set().union(*kinds_of_projections(base).values())))
        rank, root = config.trainer.lora.rank, run_dir / SERVICE_FOLDER / ADAPTER_ROOT
        return ServedAdapters(rank, targets, ADAPTERS_IN_BATCH, root=root, most_loaded=ADAPTERS_LOADED)
    layout = adapter_layout(base, config.trainer)
    assert layout is not None
    held_out = tuple(
        (EVAL_ADAPTER + name, str(Path(each.adapter).expanduser().resolve()))
        for name, each in config.eval.sets.items()
        if each.adapter is not None
    )
    versions = min(config.schedule.max_staleness, 6) + 1 + config.eval.exact
    return ServedAdapters(layout.shape.rank, layout.shape.targets, versions + len(held_out), held_out)


def frozen_server_spec(
    model: FrozenModelConfig, dtype: str, device: str, mem_fraction: float, **options: Any
) -> ServerSpec:
    """The server of a frozen model: a classifier, or one that generates. Its weights never change.

    `mem_fraction` is a share of the memory that is free when it starts; `options` are further fields of `ServerSpec`.
    """
    serving = RolloutConfig(
        tensor_parallel=model.tensor_parallel,
        mem_fraction=mem_fraction,
        context_length=model.context_length,
        max_total_tokens=model.max_total_tokens,
        max_running_requests=model.max_running_requests or (model.max_inflight if device == "cpu" else None),
        # Answers are read whole.
        stream_interval=0,
        server_args=model.server_args,
        # A quantized folder is served as it is stored.
        fp8=True,
    )
    classifier = isinstance(model, RewardModelConfig) and model.kind == "classifier"
    return ServerSpec(model.path, serving, dtype, device, classifier=classifier, **options)


def stand_ins_path() -> str:
    """The folder of import-only packages for CPU servers."""
    package = find_spec("megasync_patches")
    if package is None or not package.submodule_search_locations:
        raise ServerError("the package megasync_patches is not installed; install megasync again")
    return str(Path(package.submodule_search_locations[0]) / "sglang_cpu_standins")


def _interface_of(host: str) -> str:
    """The network interface with this address; empty if this machine has none."""
    try:
        wanted = {address for *_, (address, *_) in socket.getaddrinfo(host, None)}
    except OSError:
        return ""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, each in interfaces if any(address.address in wanted for address in each)), "")


def _cores(ranks: int) -> list[str]:
    """One core per rank, reused in turn when there are fewer cores."""
    cores = sorted(os.sched_getaffinity(0))
    return [str(cores[rank % len(cores)]) for rank in range(ranks)]
