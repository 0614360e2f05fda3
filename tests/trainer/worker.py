"""Trainer ranks, each in its own process: `worker.py FLAVOUR STORES SOCKETS`.

FLAVOUR is "local", or "te" for Transformer Engine's layers, then possibly with the version of another megatron-core:
"te 0.19.2". STORES is the folder of the rendezvous files, where rank N logs to log-N.txt. SOCKETS are the numbers of
one socket per rank, as JSON. Megatron is imported once, and the ranks are forked. Each line on a rank's socket is also
a folder: the function that its request.json names is called with the arguments given there, its result is written to
result-RANK.pt, and "done" is sent. An error ends the process. A function is one of `rank_engines`, or of the test
module whose file the request names.
"""

import gc
import importlib.util
import json
import os
import sys
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import rank_engines
import torch
import torch.distributed as dist
from local_ranks import forked


@cache
def module_of(file):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    sockets = json.loads(sys.argv[3])
    rank, link = forked(sockets)
    log = os.open(rank_engines.STORES / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    rank_engines.join(rank, len(sockets))
    for line in link.makefile():
        folder = Path(line.strip())
        request = json.loads((folder / "request.json").read_text())
        module = module_of(request["file"]) if request["file"] else rank_engines
        torch.save(getattr(module, request["case"])(**request["arguments"]), folder / f"result-{rank}.pt")
        link.sendall(b"done\n")
        # The groups of the last engine have threads that wake up a hundred times a second, and this process may stay
        # idle for long.
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
