"""The machines of a run, the weight sync between them, and the deadlines of all waits."""

from __future__ import annotations

from dataclasses import dataclass

from megasync.config.limits import AT_LEAST_ONE, HOST, NOT_NEGATIVE, PATH, POSITIVE, RAY_ADDRESS, Choice, Range, limited


@dataclass
class ClusterConfig:
    """The machines that a run uses."""

    # auto takes cuda if this machine has a GPU. Training on cuda needs Transformer Engine.
    device: str = limited("auto", Choice("auto", "cpu", "cuda"))
    # Ray cluster: null starts one here for the run; "auto" or host:port joins one.
    address: str | None = limited(None, RAY_ADDRESS)
    # GPUs (cuda) or ranks (cpu) per node. A pool that spans several nodes takes whole nodes.
    devices_per_node: int = limited(8, Range(1, 1024))
    # Whether the only trainer rank and the only server share one device, to try a run on a single GPU: docs/install.md.
    share_device: bool = False
    # Whether trainer ranks and servers share all devices of one node and compute in turns: docs/colocation.md.
    colocate: bool = False
    # Address that servers and collectives bind to; auto is each node's own, which pools that span nodes require.
    host: str = limited("127.0.0.1", HOST)
    # Whether generation requests must carry a key: always, never, or auto (if `host` is not a loopback address or the
    # environment variable MEGASYNC_GENERATION_KEY is set). The key is that of the variable, or a random one:
    # docs/security.md.
    generation_key: str = limited("auto", Choice("auto", "always", "never"))
    # PEM file with the router's certificate, on the machine where the router runs; null uses plain HTTP.
    tls_cert: str | None = limited(None, PATH)
    # PEM file with the certificate's private key, not encrypted.
    tls_key: str | None = limited(None, PATH)
    # PEM file with the authorities that the router's clients trust; null trusts `tls_cert` itself.
    tls_ca: str | None = limited(None, PATH)


@dataclass
class SyncConfig:
    """How the trainer sends weights to the servers: docs/weight_sync.md."""

    # What servers do with running requests during a sync: in_place, retract or abort.
    pause_mode: str = limited("retract", Choice("in_place", "retract", "abort"))
    # p2p (shard to shard, into servers with megasync's plugin), broadcast (whole tensors, into any server), disk
    # (through a folder that any server can read, also outside the cluster), adapters (those of `trainer.lora` alone,
    # through such a folder, for servers that serve them beside the model), or auto, which takes p2p if possible, else
    # broadcast, and logs why.
    transport: str = limited("auto", Choice("auto", "p2p", "broadcast", "disk", "adapters"))
    # Maximum size of a message, or file, in MiB; a sender holds two.
    bucket_mb: int = limited(256, AT_LEAST_ONE)
    # p2p: where servers stage a version until they commit it: host (pinned memory beside a GPU), or device, which
    # shortens the pause and takes as much device memory as the weights.
    arena: str = limited("host", Choice("device", "host"))
    # p2p: size of that staging area on each server rank, in MiB; null takes what a version needs. A rank with less room
    # pauses during the whole transfer.
    arena_mb: int | None = limited(None, AT_LEAST_ONE)
    # p2p: number of servers that are updated concurrently; null updates all at once.
    wave: int | None = limited(None, AT_LEAST_ONE)
    # p2p: send only changed elements if that is smaller. Ranks keep a host copy of what they sent last.
    delta: bool = False
    # p2p: every n-th sync is a full one even with `delta`; 0 never.
    delta_full_every: int = limited(100, NOT_NEGATIVE)
    # disk: folder for versions that all nodes and servers share and only this run writes; null takes `sync` in the run
    # directory.
    disk_dir: str | None = limited(None, PATH)
    # disk: versions to keep; each is a complete Hugging Face folder.
    disk_keep: int = limited(2, AT_LEAST_ONE)
    # Compare trainer and server log-probs on fixed prompts after every n-th sync; 0 never.
    parity_every: int = limited(1, NOT_NEGATIVE)
    # Maximum mean absolute difference per token, in nats; null takes 1e-3 for float32 and 0.2 for bfloat16.
    parity_threshold: float | None = limited(None, POSITIVE)


@dataclass
class TimeoutConfig:
    """Deadlines in seconds, one for each wait. docs/configuration.md#relations-between-deadlines"""

    # Start of a server, the router or a rollout worker, until it answers.
    server_start: float = limited(300.0, POSITIVE)
    # Start of the trainer, until every rank has loaded its weights.
    trainer_start: float = limited(300.0, POSITIVE)
    # Return of a lost node, before training goes on without it (`trainer.min_data_parallel`).
    lost_node: float = limited(120.0, POSITIVE)
    # One generation request, or one request to a reward model.
    request: float = limited(600.0, POSITIVE)
    # Each phase of a weight sync.
    weight_sync: float = limited(300.0, POSITIVE)
    # One call of a reward function.
    reward: float = limited(60.0, POSITIVE)
    # One call of an environment.
    environment: float = limited(60.0, POSITIVE)
    # One sample of `rollout.agent`, from the start of the agent to its return; waiting for a thread does not count.
    agent: float = limited(1500.0, POSITIVE)
    # One answer of a rollout worker's event loop (`rollout.workers`). User code that blocks it for longer is taken for
    # hung: the worker is killed and replaced.
    rollout_worker: float = limited(180.0, POSITIVE)
    # One message of a p2p sync without progress.
    sync_stall: float = limited(30.0, POSITIVE)
    # One training step, or one save of a checkpoint. A collective of the trainer ranks (Megatron's distributed timeout)
    # may take twice that.
    train_step: float = limited(1800.0, POSITIVE)
    # Watchdog: if no group finishes and no step is trained for this long, the run stops and reports what each part
    # waits for. Time in a step, a save, a restart of the ranks or a weight sync does not count, because each has a
    # deadline.
    no_progress: float = limited(1800.0, POSITIVE)
    # Clean exit of a process, after which it is killed.
    shutdown: float = limited(60.0, POSITIVE)
