"""An agent that needs the gateway, a sandbox and two MCP servers, with traps while it has all of them."""

import os
import sys
from pathlib import Path

import httpx
from traps import FOLDER, STAY, finish, folder, sprung

from megasync.data.digits import CHARACTERS
from megasync.integrations.mcp.server import McpServer
from megasync.sandboxes.kinds import starter_of

# In the sandbox; the processes of the MCP servers are the ones to be killed at places of their own.
PLACES, TOOLS, REMOTE_TOOLS = ("worker", "keeper", "sandbox", "driver"), "tools", "remote_tools"
# The environment variable with the address of a server that runs by itself.
REMOTE_URL = "REMOTE_TOOLS_URL"

sandboxes = starter_of({"kind": "process"})
program = [sys.executable, str(Path(__file__).with_name("mcp_program.py")), "stdio"]
own = McpServer("tools", program, environment={FOLDER: folder()})
remote = McpServer("remote", url=os.environ[REMOTE_URL])


async def play(base_url, api_key, sample, model):
    """Answers twice; between the answers are a digit of the sandbox and one of each MCP server."""
    options = {"headers": {"Authorization": f"Bearer {api_key}"}, "timeout": 240.0}
    url = f"{base_url.removesuffix('/v1')}/inference/v1/generate"
    ids, answers = [CHARACTERS.index(sign) for sign in sample["prompt"]], []
    async with (
        await sandboxes.start() as sandbox,
        own.session() as offered,
        remote.session() as offered_remotely,
        httpx.AsyncClient(**options) as http,
    ):

        async def answer():
            reply = await http.post(url, json={"token_ids": ids})
            (choice,) = reply.raise_for_status().json()["choices"]
            ids.extend(choice["token_ids"])
            answers.append("".join(CHARACTERS[token] for token in choice["token_ids"] if token < len(CHARACTERS)))

        await answer()
        if any(sprung(place, os.getpid()) for place in PLACES):
            await sandbox.run(f"sleep {STAY:.0f}; : {folder()}", seconds=STAY)
        ids.append(int((await sandbox.run("echo 3")).stdout))
        for place, listed in ((TOOLS, offered), (REMOTE_TOOLS, offered_remotely)):
            tools = {tool.name: tool for tool in listed}
            if sprung(place, int(await tools["pid"].call({}, 60.0))):
                await tools["slow"].call({"seconds": STAY}, STAY)
            ids.append(int(await tools["add"].call({"a": 3, "b": 4}, 60.0)))
        await answer()
    return finish(answers)
