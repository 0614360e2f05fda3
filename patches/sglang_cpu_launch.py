"""Starts SGLang 0.5.23 on a CPU: ``python -m megasync_patches.sglang_cpu_launch ARGUMENTS``, as with SGLang's launcher.

Six changes, for servers on a CPU only:

- Scheduler and detokenizer are forked instead of spawned. A spawned child imports SGLang and PyTorch again, which takes
  most of the start-up time (20 s instead of 8 s on two cores) and three times the memory. Forking is safe here, because
  at that point the parent has no accelerator and a single thread.
- The `torch_native` attention backend is added to SGLang's list of backends for deterministic inference. Without
  deterministic inference SGLang ignores `sampling_seed`.
- Batch-invariant kernels, which need an accelerator, are not enabled. So the last bits of a matrix product depend on
  the batch: log-probs change by about 1e-5, and the sampled token practically never.
- SGLang does not freeze garbage collection after a skipped warm-up. It would send the request before its port is open,
  and log the refused connection as if the start had failed. `SGLangServer` sends the request once the server responds.
- Latent attention (DeepSeek) uses its absorbed form with the `torch_native` backend. SGLang selects the form by the
  name of the backend and has no entry for this one. It would prefill with explicit keys and values, but this backend
  reads them from the cache, which contains the latents.
- If MEGASYNC_INSTANCE is set, it names the server's file in /dev/shm, which SGLang never removes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from megasync_patches import Patch

from megasync.importing import quick_imports


def apply() -> None:
    """Applies the changes to SGLang in this process."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups.choices import (
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        add_deterministic_attention_backend_choices,
    )
    from sglang.srt.entrypoints import engine, http_server
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.server_args import PortArgs

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    if "torch_native" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        add_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None
    http_server._freeze_gc_after_server_warmup = lambda server_args: None

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
    with quick_imports():
        # Imported before the scheduler is forked, so that the scheduler inherits it.
        import sglang.srt.models.registry  # noqa: F401
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        apply()
        load_plugins()
    run_server(prepare_server_args(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
