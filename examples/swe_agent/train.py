"""A small model learns to fix planted bugs with mini-swe-agent: `python examples/swe_agent/train.py [key=value ...]`.

The tasks and the model are made here. The model is warmed up on a few solved tasks, from which it learns the form of a
command and little of what to write. SWE_AGENT_PYTHON names mini-swe-agent's interpreter (README.md).
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from warm_start import make_model  # noqa: E402

import megasync  # noqa: E402
from swe_agent.agent import CONFIG as HARNESS  # noqa: E402
from swe_agent.agent import agent  # noqa: E402
from swe_agent.make_tasks import make_tasks  # noqa: E402

TASKS, MODEL = Path("models/swe_agent/tasks"), Path("models/swe_agent/model")
CONFIG = ROOT / "configs" / "recipes" / "swe_agent.yaml"
COUNT, HELD_OUT = 512, 96
# What to replace in the line of the bug, by its kind.
FIXES = {
    "operator": "/ - / + /",
    "comparison": "/ < / > /",
    "range": "/ - / + /",
    "index": "/0/-1/",
    "negation": "/ in / not in /",
    "variable": "/ > {number}/ > {first}/",
}
COMMAND, END = "```mswea_bash_command\n", "\n```"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def solved(task: Path) -> list[dict[str, str]]:
    """The conversation that fixes a task: look, replace, submit."""
    config = yaml.safe_load(Path(HARNESS).read_text())
    instruction = (task / "instruction.md").read_text().strip("\n")
    (module,) = (task / "environment").iterdir()
    text = module.read_text()
    kind = tomllib.loads((task / "task.toml").read_text())["metadata"]["kind"]
    name = instruction.partition("(")[0]
    found = re.search(rf"def {name}\((\w+), \w+\):\n(.*)", text)
    assert found
    number = re.search(r"> (\d)", found[2])
    fix = FIXES[kind].format(first=found[1], number=number[1] if number else "")
    commands = [f"cat {module.name}", f"sed -i '/{name}/,+1s{fix}' {module.name}", SUBMIT]
    said = [Template(config["agent"][f"{name}_template"]).render(task=instruction) for name in ("system", "instance")]
    messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), said, strict=True)]
    for command, output in zip(commands, (text, "", ""), strict=True):
        shown = {"returncode": 0, "exception_info": "", "output": output}
        observation = Template(config["model"]["observation_template"]).render(output=shown)
        messages.append({"role": "assistant", "content": COMMAND + command + END})
        messages.append({"role": "user", "content": observation})
    return messages[:-1]


def pieces(conversation: list[dict[str, str]]) -> str:
    """The regular expression of the tokens: what all conversations share, words with the space before, characters."""
    system, rest = conversation[0]["content"], conversation[1]["content"].partition("\n")[2].partition("\n")[2]
    fixed = [system, rest, COMMAND, END, SUBMIT, "sed -i '/", ",+1s/", "exit status 0 \n", ", but should return "]
    return "|".join([*map(re.escape, fixed), " ?[A-Za-z]+", r"[\s\S]"])


def main() -> None:
    if not TASKS.exists():
        make_tasks(TASKS, COUNT, HELD_OUT)
    if not MODEL.exists():
        # The words of all tasks, and the solutions of some that are not in the test set.
        paths = [*sorted((TASKS / "train").iterdir()), *sorted((TASKS / "test").iterdir())]
        conversations = [solved(path) for path in paths]
        make_model(MODEL, pieces(conversations[0]), conversations, shown=96, steps=200)
    options: dict[str, Any] = {"agent": agent}
    # Deadlines of an agent, which only this program knows. Those of the arguments come later and hold.
    deadlines = ["timeouts.agent=400", "timeouts.request=240"]
    megasync.AsyncTrainer(CONFIG, [*deadlines, *sys.argv[1:]], **options).train()


if __name__ == "__main__":
    main()
