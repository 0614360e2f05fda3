"""The section of the machines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ClusterConfig:
    """The machines that a run takes."""

    # auto takes cuda when this machine has a GPU. Training on cuda takes Transformer Engine.
    device: str = "auto"
    # Ray cluster: null starts one here for the run; "auto" or host:port joins one.
    address: str | None = None
    # GPUs (cuda) or ranks (cpu) of one node; pools are made of whole nodes when they span several.
    devices_per_node: int = 8
    # Address that servers and collectives bind to; auto is each node's own, needed when the pools span nodes.
    host: str = "127.0.0.1"
    # Whether requests for tokens must carry a key: auto, where host is no loopback address; always; never. The run draws
    # the key, or takes that in the environment variable MEGASYNC_GENERATION_KEY: docs/security.md.
    generation_key: str = "auto"
    # PEM file of the router's certificate, on the machine where it runs; null: the router speaks plain HTTP.
    tls_cert: str | None = None
    # PEM file of the certificate's private key, not encrypted.
    tls_key: str | None = None
    # PEM file of the authorities that the router's clients trust; null: tls_cert itself.
    tls_ca: str | None = None
