"""A shard of the index in a process of its own, and the retriever's connection to it.

    python -m deepresearch.remote_shard --data DIR --shard 0 [--device cuda:0] [--port 8110]

The server loads one shard and answers `POST /search?top_k=K` and `GET /health`. Vectors, scores and rows travel as raw
arrays in little-endian order: [queries, dimension] float32 in; [queries, found] float32 and int64 out.
"""

from __future__ import annotations

import argparse
import http.client
import json
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response

from deepresearch.folders import DataFolder
from deepresearch.index_folder import shard_files
from deepresearch.serve import add_address, serve
from deepresearch.sharded_index import MatrixShard, load_shards

# Seconds for one search, or for a connection.
TIMEOUT = 10.0


class RemoteShard:
    """A shard behind HTTP, over one connection that is opened again when it breaks. Not for several threads."""

    def __init__(self, url: str) -> None:
        """Raises OSError when the server does not answer."""
        self.url = url
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT)
        health = json.loads(self._ask("GET", "/health"))
        self.rows, self.dimension = health["rows"], health["dimension"]

    def search(self, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Searches as `Shard.search` does. Raises OSError when the server does not answer."""
        answer = self._ask("POST", f"/search?top_k={top_k}", np.ascontiguousarray(vectors, "<f4").tobytes())
        found = min(top_k, self.rows)
        scores = np.frombuffer(answer, "<f4", len(vectors) * found)
        rows = np.frombuffer(answer, "<i8", len(vectors) * found, offset=scores.nbytes)
        return scores.reshape(-1, found), rows.reshape(-1, found)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        try:
            return self._once(method, path, body)
        except (http.client.HTTPException, ConnectionError):
            # The server has closed an idle connection, or was restarted.
            self._connection.close()
        try:
            return self._once(method, path, body)
        except http.client.HTTPException as error:
            self._connection.close()
            raise ConnectionError(f"shard {self.url}{path}: {type(error).__name__}: {error}") from error

    def _once(self, method: str, path: str, body: bytes | None) -> bytes:
        self._connection.request(method, path, body)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise ConnectionError(f"shard {self.url}{path} answered {response.status}: {answer[:300]!r}")
        return answer


def create_app(shard: MatrixShard) -> FastAPI:
    app = FastAPI(title="shard")

    @app.post("/search")
    async def search(request: Request, top_k: int) -> Response:
        body = await request.body()
        if top_k < 1 or not body or len(body) % (4 * shard.dimension):
            raise HTTPException(422, f"top_k={top_k} and {len(body)} bytes for vectors of {shard.dimension} float32")
        # On the event loop: the retriever sends one batch at a time.
        scores, rows = shard.search(np.frombuffer(body, "<f4").reshape(-1, shard.dimension), top_k)
        answer = scores.astype("<f4").tobytes() + rows.astype("<i8").tobytes()
        return Response(answer, media_type="application/octet-stream")

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok", "rows": shard.rows, "dimension": shard.dimension}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder that prepare.py made")
    parser.add_argument("--shard", type=int, required=True, help="number of the shard, from 0")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, ...")
    add_address(parser, port=8110)
    options = parser.parse_args()
    files = shard_files(DataFolder.at(options.data).index)
    if not 0 <= options.shard < len(files):
        parser.error(f"--shard={options.shard}: the index has shards 0 to {len(files) - 1}")
    (shard,) = load_shards(files, [options.device], options.shard)
    serve(create_app(shard), options)


if __name__ == "__main__":
    main()
