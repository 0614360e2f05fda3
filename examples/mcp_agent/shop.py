"""A small MCP server: a shop's store room, of which only the server knows what lies where.

python shop.py           # over standard input and output
python shop.py 8000      # streamable HTTP at http://127.0.0.1:8000/mcp
"""

from __future__ import annotations

import random
import sys

_chance = random.Random(0)
# Items by their codes, with the shelf on which each lies; and how many pieces of what lies there a shelf has.
SHELVES = {str(code): str(_chance.randint(10, 99)) for code in _chance.sample(range(1000, 10_000), 4000)}
COUNTS = {str(shelf): str(_chance.randint(10, 99)) for shelf in range(10, 100)}


def shelf(item: str) -> str:
    """The shelf on which an item lies."""
    return SHELVES.get(item) or f"no item {item}"


def count(shelf: str) -> str:
    """The number of pieces on a shelf."""
    return COUNTS.get(shelf) or f"no shelf {shelf}"


def main(port: str = "") -> None:
    from mcp.server import MCPServer  # pyright: ignore[reportMissingImports]

    server = MCPServer("shop")
    server.add_tool(shelf, structured_output=False)
    server.add_tool(count, structured_output=False)
    if port:
        server.run("streamable-http", host="127.0.0.1", port=int(port))
    else:
        server.run("stdio")


if __name__ == "__main__":
    main(*sys.argv[1:])
