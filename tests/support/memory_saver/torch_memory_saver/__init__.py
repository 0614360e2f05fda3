"""Stands in for torch_memory_saver, whose library is for GPUs only, in a server on a CPU.

What is allocated in a region is really freed by `pause`, so any use of it meanwhile fails, and comes back with its
bytes (``enable_cpu_backup``) or with others. Each change is appended to the file $MEMORY_SAVER_LOG, as
``<process id> <tag> <bytes that are present>``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GARBAGE = 0x7B


class _Recorded(TorchDispatchMode):
    def __init__(self, storages):
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage
        return result


class _MemorySaver:
    enabled = True

    def __init__(self):
        self._regions = defaultdict(dict)
        self._backed_up = {}
        self._copies = {}

    @contextmanager
    def region(self, tag, enable_cpu_backup=False):
        storages = {}
        with _Recorded(storages):
            yield
        # What only this dictionary holds was freed within the region.
        kept = {key: storage for key, storage in storages.items() if torch._C._storage_Use_Count(key) > 1}
        self._regions[tag] |= kept
        self._backed_up[tag] = enable_cpu_backup
        self._report(tag)

    def pause(self, tag):
        if tag in self._copies:
            raise RuntimeError(f"{tag} is paused already")
        copies = self._copies[tag] = []
        for storage in self._regions[tag].values():
            copies.append((storage, storage.nbytes(), storage.clone() if self._backed_up[tag] else None))
            storage.resize_(0)
        self._report(tag)

    def resume(self, tag):
        for storage, nbytes, copy in self._copies.pop(tag):
            storage.resize_(nbytes)
            if copy is None:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(GARBAGE)
            else:
                storage.copy_(copy)
        self._report(tag)

    def cuda_graph(self, **options):
        return nullcontext()

    def disable(self):
        return nullcontext()

    def _report(self, tag):
        if path := os.environ.get("MEMORY_SAVER_LOG"):
            present = sum(storage.nbytes() for storage in self._regions[tag].values())
            with open(path, "a") as log:
                log.write(f"{os.getpid()} {tag} {present}\n")


torch_memory_saver = _MemorySaver()


def configure_subprocess():
    return nullcontext()
