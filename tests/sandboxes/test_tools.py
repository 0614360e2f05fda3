"""The tools of a sandbox do what a model asks, and tell it what it did wrong."""

import pytest
from waits import PATIENCE

from megasync.rollout.tools import Toolbox, ToolCall
from megasync.sandboxes import Spec
from megasync.sandboxes.kinds import starter_of
from megasync.sandboxes.tools import sandbox_tools

pytestmark = pytest.mark.processes


async def test_a_model_edits_and_runs_a_program():
    calls = [
        ("write", {"path": "src/a.py", "text": "print(1)\nprint(2)\n"}, "wrote 2 lines to src/a.py"),
        ("view", {"path": "src/a.py", "first": 2}, "2\tprint(2)"),
        ("replace", {"path": "src/a.py", "old": "2", "new": "3"}, "wrote 2 lines to src/a.py"),
        ("shell", {"command": "python3 src/a.py; exit 5"}, "exit status 5\n1\n3\n"),
        ("shell", {"command": "sleep 600"}, "killed after 2 seconds\n"),
        ("replace", {"path": "src/a.py", "old": "print", "new": ""}, "Error: DataError: the text stands 2 times"),
        ("view", {"path": "none"}, "No such file"),
        ("write", {"path": "/tmp/x", "text": "y"}, "wrote 1 lines to /tmp/x"),
    ]
    async with await starter_of(Spec()).start() as sandbox:
        for name, arguments, expected in calls:
            seconds = 2 if "killed" in expected else PATIENCE
            toolbox = Toolbox(sandbox_tools(sandbox, seconds=seconds), timeout=2 * PATIENCE)
            (message,) = await toolbox.run([ToolCall("1", name, arguments)])
            assert expected in message["content"]
        assert await sandbox.get("/tmp/x") == b"y"
