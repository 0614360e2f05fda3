"""SGLang servers on CPUs as a rollout of verl, named sglang_cpu: verl's own replicas need GPUs.

verl finds them when this module is imported with it (VERL_USE_EXTERNAL_MODULES=cpu_servers). A replica is one stock
server, started by an actor that also passes verl's requests on. Weights travel as a Hugging Face folder on this
machine's disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import save_file
from verl.workers.rollout import base, replica
from verl.workers.rollout.utils import ensure_async_iterator

from megasync.config.schema import RolloutConfig
from megasync.serving.control import ServerControl
from megasync.serving.server import ServerSpec, SGLangServer

NAME = "sglang_cpu"
# Seconds.
START, REQUEST = 300.0, 300.0


def actor_name(replica_rank: int) -> str:
    return f"{NAME}_{replica_rank}"


class CpuServer:
    """One server, and the methods by which verl asks it. verl's names for freeing GPU memory find nothing to free."""

    def __init__(self, config: Any, model_path: str, replica_rank: int) -> None:
        self._config = config
        rollout = RolloutConfig(
            tensor_parallel=config.tensor_model_parallel_size,
            max_total_tokens=8192,
            max_running_requests=64,
            mem_fraction=0.3,
        )
        log = Path(tempfile.gettempdir()) / f"{actor_name(replica_rank)}-{os.getpid()}.log"
        self._server = SGLangServer(ServerSpec(model_path, rollout, config.dtype, "cpu"), "127.0.0.1", 0, log)
        # verl's number of the weights.
        self._step = 0

    async def start(self) -> str:
        self._control = ServerControl(await self._server.start(START))
        return self._control.url

    async def generate(self, prompt_ids: list[int], sampling_params: dict, request_id: str, **_: Any) -> Any:
        """Generates as verl's own servers do. An aborted request returns the tokens it has; verl asks for the rest."""
        room = self._config.prompt_length + self._config.response_length - len(prompt_ids)
        params = {name: value for name, value in sampling_params.items() if name not in ("logprobs", "max_tokens")}
        wanted = sampling_params.get("max_tokens", self._config.response_length)
        params["max_new_tokens"] = min(wanted, room)
        body = {"rid": request_id, "input_ids": list(prompt_ids), "sampling_params": params, "return_logprob": True}
        reply = (await self._control.post("/generate", body, REQUEST))["meta_info"]
        found = reply.get("output_token_logprobs") or []
        return replica.TokenOutput(
            token_ids=[entry[1] for entry in found],
            log_probs=[entry[0] for entry in found],
            stop_reason="aborted" if reply["finish_reason"]["type"] == "abort" else "completed",
            extra_fields={"global_steps": self._step},
        )

    async def load(self, folder: str, step: int | None) -> None:
        await self._control.post("/update_weights_from_disk", {"model_path": folder}, REQUEST)
        self._step = step

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Ends what is under way; what comes meanwhile waits for `resume_generation`."""
        await self._control.post("/pause_generation", {"mode": "abort"}, REQUEST)

    async def resume_generation(self) -> None:
        await self._control.post("/continue_generation", {"torch_empty_cache": False}, REQUEST)

    async def clear_kv_cache(self) -> None:
        await self._control.post("/flush_cache", {}, REQUEST)

    async def nothing(self) -> None:
        """There is no memory of a GPU to give away or to take back."""

    wake_up = sleep = release_kv_cache = resume_kv_cache = nothing


class CpuReplica(replica.RolloutReplica):
    async def launch_servers(self) -> None:
        server: Any = ray.remote(CpuServer)
        server = server.options(name=actor_name(self.replica_rank), max_concurrency=self.max_concurrency)
        handle = server.remote(self.config, self.model_config.path, self.replica_rank)
        self._server_handle = handle
        self._server_address = await handle.start.remote()
        self.servers = [handle]


class CpuAdapter(base.BaseRollout):
    """Hands weights to a server, in each rank of a trainer or in separate workers beside it (``replica_rank``).

    Every rank takes every tensor; the first of a replica's ranks passes them on.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int | None = None, **_: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        found, place = divmod(int(os.environ["RANK"]), self.config.tensor_model_parallel_size)
        self.replica_rank = found if replica_rank is None else replica_rank
        self.is_leader_rank = place == 0

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **_: Any
    ) -> None:
        tensors = {}
        async for name, tensor in ensure_async_iterator(weights):
            if self.is_leader_rank:
                tensors[name] = tensor.clone()
        if self.is_leader_rank:
            with tempfile.TemporaryDirectory() as folder:
                save_file(tensors, Path(folder) / "model.safetensors")
                assert self.model_config.local_path is not None
                shutil.copy(Path(self.model_config.local_path) / "config.json", folder)
                server: Any = ray.get_actor(actor_name(self.replica_rank))
                await server.load.remote(folder, global_steps)

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the server is always there."""

    async def release(self) -> None:
        """Keeps the server: it is always there."""


replica.RolloutReplicaRegistry.register(NAME, lambda: CpuReplica)
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{CpuAdapter.__name__}"
