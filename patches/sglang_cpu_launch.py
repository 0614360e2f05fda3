"""Starts SGLang 0.5.23 on a CPU: ``python -m megasync_patches.sglang_cpu_launch ARGUMENTS``, as with SGLang's launcher.

Eleven changes, for servers on a CPU only:

- Scheduler and detokenizer are forked instead of spawned. A spawned child imports SGLang and PyTorch again, which takes
  most of the start-up time (20 s instead of 8 s on two cores) and three times the memory. Forking is safe here, because
  at that point the parent has no accelerator and a single thread.
- Megatron is not imported. SGLang's dumper of tensors looks for it, which takes a second, and does without it.
- The `torch_native` attention backend is added to SGLang's list of backends for deterministic inference. Without
  deterministic inference SGLang ignores `sampling_seed`.
- Deterministic inference is to give a request the same bits in any batch. SGLang's kernels for that need an
  accelerator. Here every row of a float32 matrix product is computed alone, and the attention of decoded requests one
  by one. Of products in bfloat16 nothing is changed.
- SGLang does not freeze garbage collection after a skipped warm-up. It would send the request before its port is open,
  and log the refused connection as if the start had failed. `SGLangServer` sends the request once the server responds.
- Latent attention (DeepSeek) uses its absorbed form with the `torch_native` backend. SGLang selects the form by the
  name of the backend and has no entry for this one. It would prefill with explicit keys and values, but this backend
  reads them from the cache, which contains the latents.
- The `torch_native` backend decodes the requests of a batch together, where it would compute attention one by one, in
  about ten small operations per request and layer; not with deterministic inference.
- Host memory that a GPU would copy from is not registered with CUDA. Servers that report routes allocate some.
- Servers with adapters do not pin host memory, which torch refuses without an accelerator.
- Servers with attention groups: a rank pads its batch to the length of another rank's, for which `torch_native` has no
  value; and an idle rank looks for work every 10 ms. The first rank alone is woken by a request, and waits for the
  others, which would sleep for a second.
- If MEGASYNC_INSTANCE is set, it names the server's file in /dev/shm, which SGLang never removes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megasync_patches import Patch
from megasync_patches.sglang_cpu_block_fp8 import PATCH as BLOCK_FP8
from megasync_patches.sglang_cpu_llama4 import PATCH as LLAMA4
from megasync_patches.sglang_cpu_lora_head import PATCH as LORA_HEAD

from megasync.base.importing import quick_imports

# Padded positions that are always cheaper than further operations.
_PADDED = 4096
# How long an idle rank of a server with attention groups sleeps.
_IDLE_MS = 10
# What `compute_rows_alone` has registered: empty without deterministic inference.
_INVARIANT: list[torch.library.Library] = []


def apply() -> None:
    """Applies the changes to SGLang in this process."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups.choices import (
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        add_deterministic_attention_backend_choices,
    )
    from sglang.srt.entrypoints import engine, http_server
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.server_args import PortArgs

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    if "torch_native" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        add_deterministic_attention_backend_choices(["torch_native"])
    decode_one_by_one = TorchNativeAttnBackend._run_sdpa_forward_decode

    def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        attended = None if _INVARIANT else attend_together(*args, **kwargs)
        return decode_one_by_one(self, *args, **kwargs) if attended is None else attended

    TorchNativeAttnBackend._run_sdpa_forward_decode = decode
    # Rows of padding attend to one position, which they overwrite themselves.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    batch_invariant_ops.enable_batch_invariant_mode = compute_rows_alone
    http_server._freeze_gc_after_server_warmup = lambda server_args: None
    common._cuda_host_register = lambda *args: None

    make_ports = PortArgs.init_new

    def make_named_ports(*args: Any, **kwargs: Any) -> PortArgs:
        ports = make_ports(*args, **kwargs)
        ports.instance_id = os.environ.get("MEGASYNC_INSTANCE", ports.instance_id)
        return ports

    PortArgs.init_new = staticmethod(make_named_ports)

    # SGLang sets "spawn" during its start, so "fork" must be set after that.
    set_environment = engine._set_envs_and_config

    def set_environment_and_fork(server_args: Any) -> None:
        set_environment(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_environment_and_fork


def compute_rows_alone() -> None:
    """Makes a row of a float32 matrix product independent of the other rows, in this process.

    The product of one row and the matrix is the same call for any number of rows. All rows together are divided into
    blocks by their number, and a row's place in its block decides the order in which its products are added.
    """
    if _INVARIANT:
        return

    def mm(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if rows.dtype != torch.float32:
            return torch.bmm(rows[None], matrix[None])[0]
        return torch.bmm(rows[:, None], matrix.expand(len(rows), *matrix.shape))[:, 0]

    def addmm(
        added: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        return beta * added + alpha * mm(rows, matrix)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what is meant here
        library.impl("mm", mm, "CPU")
        library.impl("addmm", addmm, "CPU")
    _INVARIANT.append(library)


def leave_unpinned() -> None:
    """Makes torch ignore requests for pinned memory in this process."""

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(make)
        def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return make(*args, **options)

        return made

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self


def attend_together(
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    encoder_lengths: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
    **_: object,
) -> torch.Tensor | None:
    """Attention of one new token per request, with the arguments of `_run_sdpa_forward_decode`.

    Returns None where the requests must be computed one by one: with an encoder, and where padding all to the longest
    would more than double the work.
    """
    if encoder_lengths is not None or is_cross_attn or keys.dtype != query.dtype:
        return None
    longest = int(lengths.max())
    if longest * len(lengths) > 2 * int(lengths.sum()) + _PADDED:
        return None
    # Query heads that share a key head are rows of one product, [requests, key heads, rows, head size].
    rows = query.view(len(lengths), keys.shape[1], -1, query.shape[-1])
    position = torch.arange(longest, device=lengths.device)
    visible = position < lengths[:, None]
    # Past the end of a request the table may hold anything: memory that was released and resumed is not cleared.
    slots = req_to_token[requests, :longest].masked_fill(~visible, 0)
    if sliding_window_size is not None:
        visible &= position >= lengths[:, None] - 1 - sliding_window_size
    attended = torch.nn.functional.scaled_dot_product_attention(
        rows,
        keys[slots].transpose(1, 2),
        values[slots].transpose(1, 2),
        attn_mask=visible[:, None, None],
        scale=scaling,
    )
    output.copy_(attended.reshape(output.shape))
    return output


PATCH = Patch(
    name="sglang_cpu_launch",
    package="sglang",
    versions=("0.5.23",),
    reason="on a CPU: start SGLang by fork, sample with per-request seeds, and compute latent attention correctly",
    apply=apply,
)


def main(arguments: list[str]) -> None:
    """Runs a server until it exits."""
    PATCH.needed()
    # None makes its import fail, as if it were not installed.
    modules: dict[str, Any] = sys.modules
    modules["megatron"] = None
    with quick_imports():
        # Imported before the scheduler is forked, so that the scheduler inherits it.
        import sglang.srt.models.registry  # noqa: F401
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        apply()
        load_plugins()
    settings = prepare_server_args(arguments)
    if settings.enable_lora:
        leave_unpinned()
        LORA_HEAD.apply()
    if settings.attn_dp_size > 1:
        from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

        setattr(IdleSleeper, "maybe_sleep", lambda self: self.poller.poll(_IDLE_MS))  # noqa: B010
    from sglang.srt.layers.quantization import fp8

    if not fp8._is_cpu_amx_available:
        BLOCK_FP8.apply()
        LLAMA4.apply()
    run_server(settings)


if __name__ == "__main__":
    main(sys.argv[1:])
