"""Loads painted tensors into SGLang's real model on the CPU, and compares them with a replay of the trace.

    python real_loads.py ARGUMENTS_OF_THE_SERVER SPECS      (JSON; with the environment of a server)

For models that SGLang builds on this machine but cannot serve. Prints one answer of `engine_oracle.compare` per rank.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "oracle"))

from engine_oracle import compare
from sglang.srt.server_args import prepare_server_args

from megasync.lab.engine_blueprint import build, rank_context
from megasync.layout.load_trace import trace_load

if __name__ == "__main__":
    arguments, specs = (json.loads(text) for text in sys.argv[1:])
    settings = prepare_server_args(arguments)
    answers = []
    for tp in range(settings.tp_size):
        with rank_context(settings, tp):
            answers.append(compare(model := build(settings, "cpu"), specs, trace_load(model, specs)))
    print(json.dumps(answers))
