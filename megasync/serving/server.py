"""One SGLang server: its command line, its environment, and its life.

The server starts with weight version 0 and reports the version of every token it samples. It listens on `host` only.
With an admin key every route is closed that `server_guard` does not open; the server reads its keys from a pipe, and has
not started before it has shown that it refuses a stranger (`_check_guard`).

The server keeps its tokenizer although requests are token ids in and out: leaving it out (`--skip-tokenizer-init`) saves
0.03 ms of 1.6 ms CPU per request, and stop strings need it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from megasync.config.schema import RolloutConfig
from megasync.errors import Refused, ServerError
from megasync.serving.control import ServerControl
from megasync.serving.server_guard import CLOSED_ROUTE, KEYS_VARIABLE
from megasync.serving.service import Service

# Unless the environment names a package of somebody's own.
MODEL_PACKAGE = "megasync.serving.sglang_models"

# What the stand-in folder has, each used only when the real package is missing.
_STAND_INS = ("triton", "torchvision", "sgl_kernel")

_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # More threads make small models slower, and an idle pool of them spins.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # There is no compiler on the path of a plain install.
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
    # Parsed calls of tools that do not exist are given back instead of left out: the model is to be told.
    "SGLANG_FORWARD_UNKNOWN_TOOLS": "1",
    # Seconds between two looks at whether the caller of a request is still there.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
    # Log-probs are those of the distribution that is sampled from, its temperature included.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
}

_CPU_ARGUMENTS = {
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


class SGLangServer(Service):
    """Settings in the constructor, nothing opened before `start`."""

    name = "SGLang server"

    def __init__(
        self,
        model_path: str | Path,
        rollout: RolloutConfig,
        dtype: str,
        device: str,
        host: str,
        port: int,
        log_path: str | Path,
        api_key: str | None = None,
        seed: int = 0,
        deterministic: bool = False,
        generation_key: str | None = None,
    ) -> None:
        """`dtype` is float32 or bfloat16, `device` cpu or cuda.

        `api_key` is the admin key; without one everything is open, as a test or a benchmark may want it.
        `generation_key`, with it, closes generation to those who have neither key.

        `deterministic` makes each request sample from its own seed, whatever else is in the batch.
        """
        super().__init__(host, port, log_path)
        self.model_path = Path(model_path)
        self.rollout = rollout
        self.dtype = dtype
        self.device = device
        self.api_key = api_key
        self.generation_key = generation_key
        self.seed = seed
        self.deterministic = deterministic
        self._folder: str | None = None

    def arguments(self) -> dict[str, object]:
        """Command line options; True stands for a flag. The configuration's `rollout.server_args` come last and win."""
        rollout = self.rollout
        options: dict[str, object] = {
            "--model-path": str(self.model_path),
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--tp-size": rollout.tensor_parallel,
            "--mem-fraction-static": rollout.mem_fraction,
            "--weight-version": 0,
            # Never a pickled checkpoint, which may hold code.
            "--load-format": "safetensors",
            "--random-seed": self.seed,
            # One line per request and batch otherwise.
            "--log-level": "warning",
        }
        optional = {
            "--context-length": rollout.context_length,
            "--max-total-tokens": rollout.max_total_tokens,
            "--max-running-requests": rollout.max_running_requests,
        }
        options |= {name: value for name, value in optional.items() if value is not None}
        if rollout.stream_interval:
            # Only new tokens with each piece; all of them again would be quadratic in the response's length.
            options |= {"--stream-interval": rollout.stream_interval, "--incremental-streaming-output": True}
        if self.deterministic:
            options["--enable-deterministic-inference"] = True
        if self.device == "cpu":
            options |= _CPU_ARGUMENTS
        return options | rollout.server_args

    def command(self) -> list[str]:
        launcher = "megasync_patches.sglang_cpu_launch" if self.device == "cpu" else "sglang.launch_server"
        command = [sys.executable, "-m", launcher]
        for name, value in self.arguments().items():
            if value is True:
                command.append(name)
            elif value is not False and value is not None:
                command += [name, str(value)]
        return command

    def environment(self) -> dict[str, str]:
        env = {"SGLANG_EXTERNAL_MODEL_PACKAGE": MODEL_PACKAGE} | os.environ | _ENVIRONMENT
        env.pop(KEYS_VARIABLE, None)
        if self.api_key is not None:
            env[KEYS_VARIABLE] = "stdin"
        if self._folder is not None:
            # SGLang leaves sockets and empty files in the temporary folder, and a file in /dev/shm.
            env["TMPDIR"] = self._folder
            env["MEGASYNC_INSTANCE"] = Path(self._folder).name
        if self.device != "cpu":
            # By default in the temporary folder, which does not last: every start would compile anew.
            env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "torchinductor"))
            return env
        env |= _CPU_ENVIRONMENT
        if self._folder is not None:
            env["HOME"] = env["XDG_CACHE_HOME"] = self._folder
            # A rendezvous file instead of a TCP store, which would listen on all interfaces.
            env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{self._folder}/rendezvous"
        if self.rollout.tensor_parallel > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores(self.rollout.tensor_parallel))
        if any(find_spec(name) is None for name in _STAND_INS):
            path = [stand_ins_path(), *filter(None, [env.get("PYTHONPATH")])]
            env["PYTHONPATH"] = os.pathsep.join(path)
        return env

    def secrets(self) -> bytes | None:
        if self.api_key is None:
            return None
        return json.dumps({"admin": self.api_key, "generation": self.generation_key}).encode()

    def prepare(self) -> None:
        # In the system's temporary folder: paths of Unix sockets must be shorter than a run directory may be.
        self._folder = tempfile.mkdtemp(prefix="megasync-sglang-")

    def visible_devices(self) -> str:
        """The GPUs that were given to this process, as CUDA_VISIBLE_DEVICES has them; empty for all, or on a CPU."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def scratch(self) -> list[str]:
        return [self._folder, f"/dev/shm/sglang_loads_{Path(self._folder).name}_*"] if self._folder else []

    async def start(self, timeout: float) -> str:
        """As `Service.start`; returns the URL. Raises ServerError at once for a model folder without config.json."""
        if not (self.model_path / "config.json").is_file():
            raise ServerError(f"cannot serve {self.model_path}: the folder has no config.json")
        try:
            url = await super().start(timeout)
            await self._after_start()
            return url
        except BaseException:
            await self.stop(timeout=1.0)
            if self._folder is not None:
                # The supervisor does this, if there was one.
                shutil.rmtree(self._folder, ignore_errors=True)
            raise

    async def stop(self, timeout: float = 10.0) -> None:
        if self.device == "cpu":
            # SGLang's own shutdown polls every 5 s for work to drain, and here there is no device memory to release.
            self.kill()
        await super().stop(timeout)

    async def serving(self) -> bool:
        # /health says 503 until the warm-up is over, where there is one.
        control = ServerControl(self.url)
        try:
            await control.get("/health", timeout=5.0)
            return self.alive()
        except ServerError:
            return False
        finally:
            await control.close()

    async def _after_start(self) -> None:
        if self.api_key is not None:
            await self._check_guard()
        control = ServerControl(self.url, self.api_key)
        try:
            version = await control.weight_version(timeout=30.0)
            if version != 0:
                raise ServerError(f"{self.url} started with weight version {version} instead of 0")
            # Spares the garbage collector from walking through everything that was imported.
            await control.post("/freeze_gc", timeout=30.0)
        finally:
            await control.close()

    async def _check_guard(self) -> None:
        """Raises ServerError for a server that does not refuse a call without the key."""
        stranger = ServerControl(self.url)
        try:
            await stranger.get(CLOSED_ROUTE, timeout=30.0)
        except Refused as refused:
            if refused.status == 401:
                return
        finally:
            await stranger.close()
        raise ServerError(
            f"{self.url} answers calls without its key: megasync's plugin does not guard it; let SGLANG_PLUGINS, if it is "
            f"set, name megasync, and take out of server_args what replaces SGLang's HTTP server"
        )


def stand_ins_path() -> str:
    """The folder of import-only packages for CPU servers."""
    package = find_spec("megasync_patches")
    return str(Path(package.submodule_search_locations[0]) / "sglang_cpu_standins")


def _cores(ranks: int) -> list[str]:
    """One core per tensor-parallel rank, going round when there are fewer cores."""
    cores = sorted(os.sched_getaffinity(0))
    return [str(cores[rank % len(cores)]) for rank in range(ranks)]
