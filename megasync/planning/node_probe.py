"""The probe that `cluster_doctor` runs on each node. Does not import Ray; imports heavy packages only when needed."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.config import Config
from megasync.config.host import resolve_host

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# Packages whose versions must match because processes of a run exchange data with them.
PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "transformer-engine", "msgspec")


class NodeProbe:
    """Runs on one node; `cluster_doctor` makes an actor of this class."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._store: TCPStore | None = None

    def look(self, config: Config | None) -> dict[str, Any]:
        """The node's facts, to be compared with those of other nodes, and its findings about itself."""
        from megasync.planning.doctor import check_listening, examine

        gpus = _gpus()
        facts = {
            "python": ".".join(map(str, sys.version_info[:3])),
            "megasync's code": code_digest(),
            "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
            "devices": ", ".join(gpus) or "no GPU",
        }
        if config is not None:
            # As a run over several nodes has it.
            cluster = replace(config.cluster, address=config.cluster.address or "auto", host="auto")
            config = replace(config, cluster=cluster)
        findings = examine(config, resolve_host("auto"))
        findings += check_listening()
        return {"facts": facts, "gpus": len(gpus), "findings": [asdict(finding) for finding in findings]}

    def clock(self) -> float:
        return time.time()

    def reads(self, path: str) -> str | None:
        """The text of a file; None if this node cannot read it."""
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def listen(self) -> tuple[str, int]:
        """Opens a listener where a run with cluster.host=auto would bind, and returns its host and port."""
        host = resolve_host("auto")
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.bind((host, 0))
        self._listener.listen(256)
        return self._listener.getsockname()[:2]

    def meeting_point(self, seconds: float) -> tuple[str, int]:
        """Opens the store of an all-reduce and returns its host and port."""
        from megasync.base.store import open_store

        host = resolve_host("auto")
        self._store = open_store(host, seconds)
        return host, self._store.port

    def connect(self, places: dict[str, tuple[str, int]], seconds: float) -> dict[str, str]:
        """Connects to each address and returns the failures by name."""
        failures = {}
        for name, (host, port) in places.items():
            try:
                socket.create_connection((host, port), timeout=seconds).close()
            except OSError as error:
                failures[name] = f"{host}:{port} {error}"
        return failures

    def all_reduce(self, backend: str, host: str, port: int, rank: int, world: int, seconds: float) -> None:
        """Sums up ones over all nodes, with nccl on their first GPU. Rank 0 is the node of the meeting point.

        Raises what the process group raises, and RuntimeError for a wrong sum.
        """
        import torch
        import torch.distributed as dist

        from megasync.base.store import join_store

        dist.init_process_group(
            backend,
            store=self._store if rank == 0 else join_store(host, port, seconds),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
        )
        try:
            total = torch.ones(1, device="cuda:0" if backend == "nccl" else "cpu")
            dist.all_reduce(total)
            if int(total.item()) != world:
                raise RuntimeError(f"the sum over {world} nodes was {total.item():g}")
        finally:
            dist.destroy_process_group()
            self._store = None


def code_digest() -> str:
    """A digest of all Python files of the package."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _gpus() -> list[str]:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
