"""The section of the weight sync; docs/weight_sync.md says how it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SyncConfig:
    """How weights get from the trainer to the servers: docs/weight_sync.md."""

    # What servers do with running requests during a sync: in_place, retract or abort.
    pause_mode: str = "retract"
    # p2p (shard to shard, into servers with megasync's plugin), broadcast (whole tensors, into any server), disk
    # (through a folder that any server sees, also one outside the cluster), or auto, which takes p2p where it can, else
    # broadcast, and says why.
    transport: str = "auto"
    # Largest message on the wire, or file; a sender holds two.
    bucket_mb: int = 256
    # p2p: where servers keep a version until they commit it: host (pinned memory beside a GPU), or device, which makes
    # the pause shorter and takes the memory of a second set of weights there.
    arena: str = "host"
    # p2p: room for that on each server rank; null takes what a version needs. A rank with less room is paused during
    # the whole transfer.
    arena_mb: int | None = None
    # p2p: servers that are updated at the same time; null updates all of them together.
    wave: int | None = None
    # p2p: send only the elements that changed, when that is less. Ranks keep a host copy of what they sent last.
    delta: bool = False
    # p2p: every n-th sync is a full one all the same; 0 never.
    delta_full_every: int = 100
    # disk: where versions go, a folder that all nodes and servers share and only this run writes; null takes the run
    # directory's `sync`.
    disk_dir: str | None = None
    # disk: versions that stay there; each is a whole Hugging Face folder.
    disk_keep: int = 2
    # After every n-th sync compare trainer and server log-probs on fixed prompts; 0 never does.
    parity_every: int = 1
    # Largest mean absolute difference per token; null takes 1e-3 for float32 and 0.2 for bfloat16.
    parity_threshold: float | None = None
