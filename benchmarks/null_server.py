"""A mock SGLang server that answers `/generate` with a constant letter, in a separate process.

    python benchmarks/null_server.py [--hold 0]     # prints its URL, and serves until standard input closes

Its replies cost as little as possible, so that a benchmark measures the client.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import orjson
from aiohttp import web

# The token id of every reply, and the letter that it is in the benchmark's character tokenizer.
TOKEN, LETTER = 5, "$"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold", type=float, default=0.0, help="seconds until a request is answered")
    hold = parser.parse_args().hold

    async def generate(request: web.Request) -> web.Response:
        body = await request.read()
        if hold:
            await asyncio.sleep(hold)
        return web.Response(body=orjson.dumps(answer(orjson.loads(body))), content_type="application/json")

    app = web.Application(client_max_size=64 * 1024**2)
    app.router.add_post("/generate", generate)
    asyncio.run(serve(app))


async def serve(app: web.Application) -> None:
    """Prints the URL of a free port, and serves until standard input closes."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await runner.cleanup()


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request for `max_new_tokens` tokens."""
    count = body["sampling_params"]["max_new_tokens"]
    meta = {
        "id": body.get("rid", ""),
        "finish_reason": {"type": "length"},
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": count}],
        "output_token_logprobs": [[-0.5, TOKEN, None]] * count,
    }
    return {"text": LETTER * count, "output_ids": [TOKEN] * count, "meta_info": meta}


if __name__ == "__main__":
    main()
