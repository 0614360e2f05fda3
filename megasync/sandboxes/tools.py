"""Tools over a sandbox: a shell, and an editor of files.

async with await starter.start() as sandbox:
    toolbox = Toolbox(sandbox_tools(sandbox))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megasync.errors import DataError
from megasync.sandboxes.protocol import Sandbox


def sandbox_tools(sandbox: Sandbox, seconds: float = 60.0) -> list[Callable[..., Any]]:
    """The functions `shell`, `view`, `write` and `replace` of one sandbox; a command may take `seconds`.

    What a call does wrong is in its result, or a DataError that the model is told. A failed sandbox is a SandboxError.
    """

    async def shell(command: str) -> str:
        """Runs a shell command in the working folder. Only files stay between calls.

        Args:
            command: the command, which may have several lines
        """
        result = await sandbox.run(command, seconds=seconds)
        late = f"killed after {seconds:g} seconds"
        status = late if result.code is None else f"exit status {result.code}"
        return f"{status}\n{result.stdout}{result.stderr}"

    async def view(path: str, first: int = 1, last: int = 200) -> str:
        """Shows lines of a file with their numbers.

        Args:
            path: the file
            first: the number of the first line
            last: the number of the last line
        """
        lines = (await sandbox.get(path)).decode(errors="replace").splitlines()
        shown = [f"{number}\t{line}" for number, line in enumerate(lines, 1) if first <= number <= last]
        return "\n".join(shown) or f"{path} has {len(lines)} lines"

    async def write(path: str, text: str) -> str:
        """Writes a file, and the folders above it.

        Args:
            path: the file
            text: its whole content
        """
        await sandbox.put({path.lstrip("/"): text.encode()}, "/" if path.startswith("/") else "")
        return f"wrote {len(text.splitlines())} lines to {path}"

    async def replace(path: str, old: str, new: str) -> str:
        """Replaces a text in a file, where it must stand exactly once.

        Args:
            path: the file
            old: the text that is there
            new: the text in its place
        """
        text = (await sandbox.get(path)).decode(errors="replace")
        if (count := text.count(old)) != 1 or not old:
            raise DataError(f"the text stands {count} times in {path}, not once; give more of what is around it")
        return await write(path, text.replace(old, new))

    return [shell, view, write, replace]
