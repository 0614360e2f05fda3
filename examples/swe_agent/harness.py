"""Runs mini-swe-agent, unchanged, for one episode after the other: `python harness.py mini.yaml`.

It runs in an environment of its own (launch/mini_swe_agent.lock), which knows nothing of megasync. Each line of its
input is an episode, {"id", "task", "model", "base_url", "api_key", "sandbox", "key"}; each line of its output how one
ended, {"id", "exit_status", "steps"}. Agent and model are mini-swe-agent's own classes. Its environment class is
replaced, as its configuration allows: commands run in a sandbox, by HTTP.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

# Before the import: no question at the first start, and no download of prices.
os.environ.update(MSWEA_CONFIGURED="true", MSWEA_SILENT_STARTUP="1", LITELLM_LOCAL_MODEL_COST_MAP="True")

import litellm  # pyright: ignore[reportMissingImports]
from minisweagent.agents.default import DefaultAgent  # pyright: ignore[reportMissingImports]
from minisweagent.config import get_config_from_spec  # pyright: ignore[reportMissingImports]
from minisweagent.environments.local import LocalEnvironment  # pyright: ignore[reportMissingImports]
from minisweagent.models import get_model  # pyright: ignore[reportMissingImports]

# It looks for the price of each answer, and would print for each that the model has none.
litellm.suppress_debug_info = True

# What the harness prints must not be taken for answers.
answers, sys.stdout = sys.stdout, sys.stderr
writing = threading.Lock()


class SandboxEnvironment(LocalEnvironment):
    """Runs commands in a sandbox, by its URL and key."""

    def __init__(self, sandbox: str, key: str, **config: Any) -> None:
        super().__init__(**config)
        self._sandbox, self._key = sandbox, key

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        seconds = timeout or self.config.timeout
        order = {"command": action.get("command", ""), "cwd": cwd or self.config.cwd, "env": self.config.env}
        request = urllib.request.Request(
            f"{self._sandbox}/run",
            json.dumps(order | {"seconds": seconds, "output_bytes": 65536}).encode(),
            {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=seconds + 120) as answer:
            result = json.load(answer)
        late = "" if result["code"] is not None else f"The command was killed after {seconds} seconds."
        code = -1 if late else result["code"]
        output = {"output": result["stdout"] + result["stderr"], "returncode": code, "exception_info": late}
        self._check_finished(output)
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        # Nothing of this machine's environment, which the base class adds.
        return self.config.model_dump() | {"system": "Linux", "release": "", "version": "", "machine": ""} | kwargs


def play(config: dict[str, Any], episode: dict[str, Any]) -> None:
    """Plays one episode and writes how it ended."""
    try:
        options = config.get("model", {})
        kwargs = options.get("model_kwargs", {}) | {"api_base": episode["base_url"], "api_key": episode["api_key"]}
        name = f"openai/{episode['model']}"
        model = get_model(name, options | {"model_kwargs": kwargs, "cost_tracking": "ignore_errors"})
        environment = SandboxEnvironment(episode["sandbox"], episode["key"], **config.get("environment", {}))
        agent = DefaultAgent(model, environment, **config["agent"])
        ended = {"exit_status": agent.run(episode["task"]).get("exit_status", ""), "steps": agent.n_calls}
    except Exception as error:  # noqa: BLE001 - whatever ends an episode; the gateway knows what its cause was
        ended = {"exit_status": type(error).__name__, "error": str(error)[:2000], "steps": 0}
    with writing:
        print(json.dumps({"id": episode["id"], **ended}), file=answers, flush=True)


def main() -> None:
    config = get_config_from_spec(sys.argv[1])
    for line in sys.stdin:
        threading.Thread(target=play, args=(config, json.loads(line)), daemon=True).start()


if __name__ == "__main__":
    main()
