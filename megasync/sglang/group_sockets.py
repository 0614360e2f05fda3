"""Sockets of a server with attention groups, which keep its processes off TCP."""

from __future__ import annotations

from typing import Any

from megasync.sglang.hooks import Stock, hook

_PORTS = "sglang.srt.server_args.PortArgs.init_new"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller."


class GroupSockets:
    """Unix sockets for the processes of a server with attention groups, in ``folder``, which is the user's alone.

    SGLang's are TCP ports of loopback, at fixed distances from the HTTP port. They may be in use, and every user of the
    machine could command the scheduler there, past the guard of the HTTP server.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._groups = 0

    def register(self) -> None:
        hook("AROUND", _PORTS, self.around_ports)
        # A port that nobody opens may be in use.
        hook("REPLACE", "sglang.srt.server_args.wait_port_available", lambda port, name: True)
        hook("REPLACE", _CONTROLLER + "get_zmq_socket_on_host", self.open_group)
        # The numbers would go to other nodes, from a port of its own.
        hook("REPLACE", _CONTROLLER + "DataParallelController._broadcast_worker_ports", lambda _, __, numbers: numbers)

    def around_ports(
        self, stock: Stock, settings: Any, dp_rank: int | None = None, worker_ports: list[int] | None = None
    ) -> Any:
        """The addresses of a server's processes, or of the ranks of one group."""
        ports = stock(settings, dp_rank, worker_ports)
        for name in ("tokenizer", "detokenizer", "rpc", "metrics"):
            setattr(ports, f"{name}_ipc_name", self._address(name))
        ports.scheduler_input_ipc_name = self._address("controller" if dp_rank is None else f"group-{dp_rank}")
        return ports

    def open_group(self, context: Any, kind: Any, **_: object) -> tuple[int, Any]:
        """Opens the sockets of the groups in turn; the number of one, in place of its port, and the socket."""
        from sglang.srt.utils.network import get_zmq_socket

        number, self._groups = self._groups, self._groups + 1
        return number, get_zmq_socket(context, kind, self._address(f"group-{number}"), True)

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"
