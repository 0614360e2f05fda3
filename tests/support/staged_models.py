"""What the ranks of servers would keep, and why a model could not be the last stage of a pipeline.

    python staged_models.py ASKED ANSWERS      (JSON files; with the environment of a server)

``ASKED`` has the arguments of a server and the specs of a checkpoint, for each model. Importing SGLang takes longer
than building all of them.
"""

import inspect
import json
import sys
from pathlib import Path

import msgspec
from sglang.srt.server_args import prepare_server_args

from megasync.lab.engine_blueprint import build, rank_context, trace_ranks


def problem_of_last_stage(arguments: list[str]) -> str:
    settings = prepare_server_args(arguments)
    if settings.pp_size == 1:
        return ""
    with rank_context(settings, settings.tp_size * settings.pp_size - 1):
        model = build(settings)
        if "pp_proxy_tensors" not in inspect.signature(model.forward).parameters:
            return "takes no activations of another stage"
        return "" if any(True for _ in model.lm_head.parameters()) else "has no head on the last stage"


def answer(arguments: list[str], specs: list) -> dict:
    try:
        problem = problem_of_last_stage(arguments)
        ranks = [] if problem else trace_ranks(arguments, specs)
    except Exception as error:  # noqa: BLE001 - a model that cannot be built is an answer
        return {"problem": repr(error), "ranks": []}
    unwritten = [name for rank in ranks for name in rank.unwritten]
    return {"problem": problem or ", ".join(unwritten), "ranks": msgspec.to_builtins(ranks)}


if __name__ == "__main__":
    asked, answers = map(Path, sys.argv[1:])
    answers.write_text(json.dumps([answer(*each) for each in json.loads(asked.read_text())]))
