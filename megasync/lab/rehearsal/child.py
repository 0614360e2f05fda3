"""Rehearses ranks one after another, in a process of its own.

    python -m megasync.lab.rehearsal.child CONFIG MEGATRON

Reads the numbers of ranks from its standard input, one a line, and ends when that is closed. Answers with one JSON
object a line: first the versions that it rehearses with, or the error that prevents it, then a `RankReport` for each
rank. Whatever else the process prints goes to standard error. Torch and Megatron are imported once for all ranks.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import IO, Any

from megasync.config import load_config
from megasync.config.schema import Config
from megasync.errors import MegasyncError

# Bytes of private memory that the process may have. A rank of 1,024 takes about 400 MB with torch and Megatron.
MEMORY = 3 * 2**30


def main(config: str, megatron: str) -> None:
    """Answers until standard input is closed."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    loaded = load_config(config)
    try:
        device = prepare(loaded, megatron)
    except MegasyncError as error:
        _answer(answers, {"error": str(error)})
        return
    from megasync.lab.rehearsal.rank import rehearse_rank

    _answer(answers, {"megatron": version("megatron-core")})
    saved: dict[int, int] = {}
    for line in sys.stdin:
        _answer(answers, asdict(rehearse_rank(loaded, int(line), device, saved)))


def prepare(config: Config, megatron: str) -> Any:
    """Prepares this process for the ranks of a configuration and returns their `rank.MetaDevice`.

    Torch and Megatron must not have been imported. Raises ConfigError if a package is missing.
    """
    from megasync.lab.rehearsal.packages import add_to_path

    if version("megatron-core") != megatron:
        add_to_path("megatron-core", megatron)

    import torch

    from megasync.device import Device, import_megatron_uncompiled, set_cuda_environment

    meta = torch.device("meta")
    cpu = config.cluster.device == "cpu"
    if cpu:
        Device("cpu").prepare_process(0)
        torch.cuda.current_device = lambda: meta  # pyright: ignore[reportAttributeAccessIssue]
    else:
        from megasync.lab.rehearsal import transformer_engine

        set_cuda_environment()
        transformer_engine.install(meta)
        import_megatron_uncompiled()
        from megasync_patches import megatron_rng_state  # pyright: ignore[reportMissingImports] - the folder patches/

        megatron_rng_state.PATCH.apply()
    from megasync.lab.rehearsal.rank import MetaDevice

    return MetaDevice("cpu" if cpu else "cuda")


def _answer(stream: IO[str], value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
