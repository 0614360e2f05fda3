"""Runs in the environment of `megasync install verifiers`: lists a taskset's tasks, or serves its environment.

    python -P side.py rows             prints a JSON object for each task
    python -P side.py serve ADDRESS    serves the environment over ZMQ, until it is ended

Each reads its order, a JSON object, from standard input. Nothing of megasync is imported: it is not installed there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any, TextIO

# pyright: reportMissingImports=false


def print_rows(order: dict[str, Any], out: TextIO) -> None:
    """Prints the tasks that are selected, each with the text of its prompt and the data that the server takes."""
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    name = order["name"]
    taskset = load_taskset(taskset_config_type(name).model_validate({**order["taskset"], "id": name}))
    chosen = taskset.select(SelectConfig.model_validate(order["select"]))
    if not chosen.bounded:
        raise ValueError(f"the taskset {name} has tasks without end; set how many in data.*.size")
    for task in chosen:
        data = task.data
        text = data.prompt_text or data.description or data.name or f"{name} {data.idx}"
        out.write(json.dumps({"prompt": text, "task": data.model_dump(mode="json")}) + "\n")


def serve(order: dict[str, Any], address: str) -> None:
    """Serves the environment of a taskset over ZMQ."""
    from verifiers.v1.serve import serve_env

    # Its messages go to the server's log; others would write a line for each request.
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("verifiers").setLevel(logging.INFO)
    serve_env(
        max_workers=order["workers"],
        address=address,
        config_data=environment_config(order["name"], order["args"], order["max_turns"]),
    )


def environment_config(name: str, args: dict[str, Any], max_turns: int) -> dict[str, Any]:
    """The environment's configuration: `args`, and for each agent what they and its author leave open.

    That is a chat in a process of this machine (verifiers' own default is a remote sandbox), and the number of turns.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    config = {**args, "taskset": {**(args.get("taskset") or {}), "id": name}}
    for role, field in env_config_type(name, config.get("id") or "").model_fields.items():
        author = field.default
        if not isinstance(author, AgentConfig):
            continue
        agent = dict(config.get(role) or {})
        if author.harness is None and default_harness_id(name) == "bash":
            agent.setdefault("harness", {"id": "null"})
        if "runtime" not in author.model_fields_set:
            agent.setdefault("runtime", {"type": "subprocess"})
        if author.max_turns is None:
            agent.setdefault("max_turns", max_turns)
        config[role] = agent
    return config


def main() -> None:
    """Reads the order and carries it out."""
    order = json.load(sys.stdin)
    # What tasksets print is no answer.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.argv[1] == "rows":
        with out:
            print_rows(order, out)
    else:
        serve(order, sys.argv[2])


# The server's worker processes import this file too.
if __name__ == "__main__":
    main()
