"""A server of a reward model: SGLang as for the rollout, with weights that stay those it was started with."""

from __future__ import annotations

from pathlib import Path

from megasync.config.schema import RewardModelConfig, RolloutConfig
from megasync.serving.engine_protocol import CLASSIFIER_VARIABLE
from megasync.serving.server import SGLangServer


class RewardModelServer(SGLangServer):
    """A classifier scores texts at `/classify`, a judge writes at `/generate`."""

    name = "reward model server"

    def __init__(
        self,
        model: RewardModelConfig,
        dtype: str,
        mem_fraction: float,
        device: str,
        host: str,
        port: int,
        log_path: str | Path,
        api_key: str | None = None,
        seed: int = 0,
        gpus: str = "",
        generation_key: str | None = None,
    ) -> None:
        """`mem_fraction` is of the memory that is free when it starts. `gpus`, as for CUDA_VISIBLE_DEVICES, are those of
        the server that it shares devices with; empty where it has devices of its own."""
        serving = RolloutConfig(
            tensor_parallel=model.tensor_parallel,
            mem_fraction=mem_fraction,
            context_length=model.context_length,
            max_total_tokens=model.max_total_tokens,
            max_running_requests=model.max_running_requests,
            # Answers are read whole.
            stream_interval=0,
            server_args=model.server_args,
        )
        super().__init__(
            model.path, serving, dtype, device, host, port, log_path, api_key, seed, generation_key=generation_key
        )
        self._classifier = model.kind == "classifier"
        self._gpus = gpus

    def arguments(self) -> dict[str, object]:
        return {"--is-embedding": self._classifier} | super().arguments()

    def environment(self) -> dict[str, str]:
        env = super().environment()
        if self._classifier:
            env[CLASSIFIER_VARIABLE] = "1"
        if self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = self._gpus
        return env
