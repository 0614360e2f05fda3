"""Many mock SGLang servers and their router in one separate process, on one port under different paths.

python benchmarks/null_cluster.py [--hold 20]      # prints its URL, and serves until standard input closes

URL/s17/...     server 17: load reports, its check, aborts
URL/router/...  the router: its list of servers, and /generate, which is answered `--hold` seconds later
"""

from __future__ import annotations

import asyncio

import orjson
from aiohttp import web
from null_server import answer, serve

LOADS = {"loads": [{"token_usage": 0.5, "num_running_reqs": 20, "num_waiting_reqs": 0}]}
INFO = {"internal_states": [{"last_gen_throughput": 1000.0}]}


class NullCluster:
    """Keeps the router's list; everything else is constant."""

    def __init__(self) -> None:
        # URLs by id.
        self._workers: dict[str, str] = {}
        self._made = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024**2)
        app.router.add_get("/router/workers", self._list)
        app.router.add_post("/router/workers", self._add)
        app.router.add_delete("/router/workers/{id}", self._remove)
        app.router.add_get("/{server}/v1/loads", self._loads)
        app.router.add_get("/{server}/server_info", self._info)
        app.router.add_post("/{server}/generate", self._check)
        app.router.add_post("/{server}/abort_request", self._abort)
        return app

    async def _list(self, request: web.Request) -> web.Response:
        # The fields of the real router's list.
        rest = {"model_id": "null", "worker_type": "regular", "is_healthy": True, "load": 20, "connection_mode": "http"}
        workers = [{"id": key, "url": url, "priority": 50, "cost": 1.0} | rest for key, url in self._workers.items()]
        return _json({"workers": workers, "total": len(workers), "stats": {"prefill_count": 0, "decode_count": 0}})

    async def _add(self, request: web.Request) -> web.Response:
        url = orjson.loads(await request.read())["url"]
        self._made += 1
        self._workers[str(self._made)] = url
        return _json({"status": "accepted"})

    async def _remove(self, request: web.Request) -> web.Response:
        self._workers.pop(request.match_info["id"], None)
        return _json({"status": "accepted"})

    async def _loads(self, request: web.Request) -> web.Response:
        return _json(LOADS)

    async def _info(self, request: web.Request) -> web.Response:
        return _json(INFO)

    async def _check(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        whole = answer(body)
        first, *ids = body["input_ids"]
        whole["meta_info"]["input_token_logprobs"] = [[None, first, None]] + [[-0.5, token, None] for token in ids]
        return _json(whole)

    async def _abort(self, request: web.Request) -> web.Response:
        return _json({})


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


if __name__ == "__main__":
    asyncio.run(serve(NullCluster().app()))
