"""MCP servers with one fault each, without any package: `python mcp_faulty.py FAULT`."""

import json
import os
import sys
import time

FAULT = sys.argv[1]
TOOLS = {
    "many": [{"name": f"tool{number}", "inputSchema": {"type": "object"}} for number in range(10_000)],
    "odd": [
        {
            "name": "odd.tool-1",
            "description": "d" * 100_000,
            "inputSchema": {
                "type": "object",
                "$defs": {"point": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/point"}]}},
                "properties": {"at": {"$ref": "#/$defs/point"}},
                "additionalProperties": False,
            },
        },
        {"name": "bare", "inputSchema": {"type": "object"}},
    ],
    "wide": [{"name": "wide", "inputSchema": {"type": "object", "title": "x" * 100_000}}],
    "blank": [{"name": "two words", "inputSchema": {"type": "object"}}],
    "endless": [{"name": "tool", "inputSchema": {"type": "object"}}],
}
PAGE = 500


def write(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def answer(message):
    method = message["method"]
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        about = {"name": "faulty", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {"listChanged": True}}, "serverInfo": about}
    if method == "tools/list":
        start = int((message.get("params") or {}).get("cursor") or 0)
        tools = TOOLS.get(FAULT, [{"name": "tool", "inputSchema": {"type": "object"}}])
        page = {"tools": tools[start : start + PAGE]}
        if start + PAGE < len(tools) or FAULT == "endless":
            page["nextCursor"] = str(start + (0 if FAULT == "endless" else PAGE))
        return page
    return {"content": [{"type": "text", "text": "done"}]}


if FAULT == "dies":
    sys.exit("no licence")
if FAULT == "silent":
    time.sleep(1000)
if FAULT == "deaf":
    # It does not end with its standard input, nor with SIGTERM, and has a child.
    import signal
    import subprocess

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdin=subprocess.DEVNULL)
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    if message["method"] not in ("initialize", "tools/list", "tools/call"):
        write({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "Method not found"}})
        continue
    called = message["method"] == "tools/call"
    if FAULT == "noise":
        print("loading ...", flush=True)
    if called and FAULT == "flood":
        while True:
            print("x" * 200, flush=True)
    if called and FAULT == "endless_line":
        while True:
            sys.stdout.write("x" * 65536)
    if called and FAULT == "other_id":
        message["id"] = "12345"
    if called and FAULT == "invalid":
        write({"jsonrpc": "2.0", "id": message["id"], "result": {"content": "no list"}})
        continue
    if called and FAULT == "internal":
        write({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32603, "message": "no database"}})
        continue
    if called and FAULT == "deaf":
        write({"jsonrpc": "2.0", "id": message["id"], "result": {"content": [
            {"type": "text", "text": f"{os.getpid()} {child.pid}"}
        ]}})  # fmt: skip
        continue
    write({"jsonrpc": "2.0", "id": message["id"], "result": answer(message)})
if FAULT == "deaf":
    time.sleep(1000)
