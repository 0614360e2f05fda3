"""Where a server would keep each tensor of a checkpoint, computed without a server, weights or device memory.

    python -m megasync.lab.engine_blueprint REQUEST ANSWER      (two JSON files)

For each rank in turn, stage by stage, SGLang's own model class is built on the meta device, and `layout.load_trace`
runs its loader. Layers take their rank and width from SGLang's runtime context, so no process group is needed. What a
server does to weights after loading (packing for a kernel) is not covered.

Apart from the plugin, this is the only file that depends on SGLang's internals.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from megasync.config.schema import RolloutConfig
from megasync.errors import MegasyncError, ServerError, TraceError
from megasync.layout.engine_layout import EngineRank
from megasync.serving.process import ManagedProcess
from megasync.serving.server import ServerSpec, SGLangServer

Specs = Sequence[tuple[str, Sequence[int]]]

# The parallel dimensions whose groups SGLang's layers look up.
_GROUPS = ("tp", "pp", "attn_tp", "attn_cp", "moe_ep", "moe_tp", "moe_dp")

# Importing SGLang takes 10 s, a large model's loader a little more, and a busy machine many times that.
SECONDS = 600.0


def engine_ranks(
    model: Path,
    tensor_parallel: int,
    dtype: str,
    device: str,
    specs: Specs,
    server_args: Mapping[str, Any] | None = None,
    fp8: bool = False,
) -> list[EngineRank]:
    """The layout of each rank of a server of this model folder, computed in a separate process from its config.json.

    Args:
        dtype: the dtype that the server uses.
        device: cpu or cuda; SGLang pads and packs differently on them.
        server_args: further arguments of the server, without the checks of `rollout.server_args`.
        fp8: the server keeps the folder's block FP8 (`rollout.fp8`).

    Raises:
        TraceError: the loader does something that cannot be repeated, or refuses the specs.
        ServerError: SGLang cannot build the model; with its last log lines.
    """
    arguments = {"--skip-tokenizer-init": True, **(server_args or {})}
    rollout = RolloutConfig(tensor_parallel=tensor_parallel, server_args=arguments, fp8=fp8)
    with tempfile.TemporaryDirectory(prefix="megasync-blueprint-") as folder:
        request, answer, log = (Path(folder) / name for name in ("request.json", "answer.json", "log"))
        # Nothing listens on the port.
        server = SGLangServer(ServerSpec(model, rollout, dtype, device), "127.0.0.1", 30000, log)
        request.write_text(json.dumps({"arguments": server.command()[3:], "specs": specs}))
        command = [sys.executable, "-m", "megasync.lab.engine_blueprint", str(request), str(answer)]
        process = ManagedProcess(command, server.environment() | {"TMPDIR": folder}, log)
        status = asyncio.run(_status(process))
        if status is None:
            raise ServerError(f"SGLang did not build {model} within {SECONDS:g} s")
        if status != 0 or not answer.is_file():
            raise ServerError(
                f"SGLang cannot build {model} for {tensor_parallel} tensor-parallel rank(s) in {dtype} on {device}; "
                f"last log lines:\n{process.tail(12)}"
            )
        reply = json.loads(answer.read_text())
    if "error" in reply:
        raise TraceError(reply["error"])
    return msgspec.convert(reply["ranks"], list[EngineRank])


async def _status(process: ManagedProcess) -> int | None:
    """Runs it for at most `SECONDS`; its exit status, or None if it had to be stopped."""
    process.start()
    try:
        return await process.wait(SECONDS)
    finally:
        await process.stop(timeout=1.0)


# Inside the separate process


def trace_ranks(arguments: Sequence[str], specs: Specs) -> list[EngineRank]:
    """The layout of each rank of a server with these arguments, of a checkpoint with these names and shapes.

    Raises TraceError when the loader does something that cannot be repeated, or refuses the specs.
    """
    from sglang.srt.server_args import prepare_server_args

    from megasync.layout.load_trace import trace_load

    # Any: the attributes of ServerArgs exist only at run time.
    settings: Any = prepare_server_args(list(arguments))
    ranks = []
    for rank in range(settings.tp_size * settings.pp_size):
        with rank_context(settings, rank):
            ranks.append(trace_load(build(settings), specs))
    return ranks


@contextmanager
def rank_context(settings: Any, rank: int) -> Iterator[None]:
    """Applies SGLang's runtime context of one rank's scheduler, with groups that only have a rank and a size."""
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context

    context = create_context(settings, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    parallel = context.parallel
    groups = {}
    for name in _GROUPS:
        place, size = getattr(parallel, f"{name}_rank"), getattr(parallel, f"{name}_size")
        groups[f"{name}_group"] = SimpleNamespace(
            rank_in_group=place,
            world_size=size,
            is_first_rank=place == 0,
            is_last_rank=place == size - 1,
            device_group=None,
            cpu_group=None,
        )
    with use_context(context), parallel.override(**groups):
        initialize_dp_attention(settings)
        initialize_moe_config()
        yield


def build(settings: Any, device: str = "meta") -> Any:
    """SGLang's model without weights, on a rank whose context applies (`rank_context`)."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import get_device, get_parallel

    load = LoadConfig()
    config = ModelConfig.from_server_args(settings)
    if get_device().device == "cpu":
        config = adjust_config_with_unaligned_cpu_tp(config, load, get_parallel().tp_size)
    with set_default_torch_dtype(config.dtype), torch.device(device):
        return _initialize_model(config, load, _get_quantization_config(config, load))


def main(request: str, answer: str) -> None:
    """Writes ANSWER. A MegasyncError becomes data there; any other error ends the process."""
    asked = json.loads(Path(request).read_text())
    try:
        reply: dict[str, Any] = {"ranks": msgspec.to_builtins(trace_ranks(asked["arguments"], asked["specs"]))}
    except MegasyncError as error:
        reply = {"error": str(error)}
    Path(answer).write_text(json.dumps(reply))


if __name__ == "__main__":
    main(*sys.argv[1:])
