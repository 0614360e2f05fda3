"""The machines of a run, the weight sync between them, and the deadlines of all waits."""

from __future__ import annotations

from dataclasses import dataclass

from megasync.config.builtin import EXTERNAL
from megasync.config.limits import AT_LEAST_ONE, HOST, NOT_NEGATIVE, PATH, POSITIVE, RAY_ADDRESS, Choice, Range
from megasync.config.rules import SET, above, at_most, excludes, key, longer_than, needs, none_of, unused_without, when

_IN_TURNS = "trainer ranks and servers compute in turns, not both at once"
_ONE_DEVICE = "broadcast has no links between processes on one device"
_RANKS = "trainer.tensor_parallel * trainer.context_parallel * trainer.pipeline_parallel * trainer.data_parallel"
_SERVERS = "rollout.servers * rollout.tensor_parallel * rollout.pipeline_parallel"
_GIVEN_BACK = "servers that give their memory back are not known to keep adapters"
# Keys of p2p transfers. Syncs between colocated ranks and servers are copies on the device.
OF_P2P = (
    unused_without("sync.transport", none_of("broadcast", "disk", "adapters", instead="auto")),
    unused_without("cluster.colocate", False, training=True),
)
# How long a hung server keeps its requests before it is declared dead, by each of the two kinds of health check.
_PROBES = (
    "rollout.health.probe_failures * rollout.health.probe_timeout + "
    "rollout.health.probe_failures * rollout.health.probe_seconds"
)
_CHECKS = (
    "rollout.health.request_failures * rollout.health.request_timeout + "
    "rollout.health.request_failures * rollout.health.request_seconds"
)
_HUNG_SERVER = "requests to a hung server would fail before it is declared dead and they continue on another server"


@dataclass
class ClusterConfig:
    """The machines that a run uses."""

    # auto takes cuda if this machine has a GPU. Training on cuda needs Transformer Engine.
    device: str = key("auto", Choice("auto", "cpu", "cuda"), megatron="use_cpu_initialization transformer_impl")
    # Ray cluster: null starts one here for the run; "auto" or host:port joins one.
    address: str | None = key(None, RAY_ADDRESS)
    # GPUs (cuda) or ranks (cpu) per node. A pool that spans several nodes takes whole nodes.
    devices_per_node: int = key(8, Range(1, 1024))
    # Whether the only trainer rank and the only server share one device, to try a run on a single GPU: docs/install.md.
    share_device: bool = key(
        False,
        excludes("rollout.external", because="it puts a trainer rank and a server that the run starts on one device"),
        needs(
            "sync.transport",
            *("disk", "adapters"),
            because="by default NCCL refuses to connect two processes on one GPU",
            training=True,
        ),
        *(
            when(SET, at_most("1", left=count, because="one rank and one server share a device", training=True))
            for count in (_RANKS, _SERVERS)
        ),
    )
    # Whether trainer ranks and servers share all devices of one node and compute in turns: docs/colocation.md.
    colocate: bool = key(
        False,
        needs("schedule.max_staleness", 0, because=_IN_TURNS, training=True),
        needs("schedule.weight_sync_steps", 1, because=_IN_TURNS, training=True),
        excludes(".share_device", because="they compute in turns or side by side", training=True),
        excludes("rollout.external", because="those servers run already", training=True),
        needs("sync.transport", none_of("broadcast", instead="auto"), because=_ONE_DEVICE, training=True),
        needs("sync.transport", none_of("adapters", instead="auto"), because=_GIVEN_BACK, training=True),
        when(SET, at_most("cluster.devices_per_node", left=_RANKS, because="it is for one node", training=True)),
        when(SET, at_most(_RANKS, left=_SERVERS, because="servers take the devices of the ranks", training=True)),
    )
    # Address that servers and collectives bind to; auto is each node's own, which pools that span nodes require.
    host: str = key("127.0.0.1", HOST)
    # Whether generation requests must carry a key: always, never, or auto (if `host` is not a loopback address or the
    # environment variable MEGASYNC_GENERATION_KEY is set). The key is that of the variable, or a random one:
    # docs/security.md.
    generation_key: str = key("auto", Choice("auto", "always", "never"))
    # PEM file with the router's certificate, on the machine where the router runs; null uses plain HTTP.
    tls_cert: str | None = key(None, PATH, needs(".tls_key"))
    # PEM file with the certificate's private key, not encrypted.
    tls_key: str | None = key(None, PATH, needs(".tls_cert"))
    # PEM file with the authorities that the router's clients trust; null trusts `tls_cert` itself.
    tls_ca: str | None = key(None, PATH, needs(".tls_cert", because="it verifies that certificate"))


@dataclass
class SyncConfig:
    """How the trainer sends weights to the servers: docs/weight_sync.md."""

    # What servers do with running requests during a sync: in_place, retract or abort.
    pause_mode: str = key("retract", Choice("in_place", "retract", "abort"))
    # p2p (shard to shard, into servers with megasync's plugin), broadcast (whole tensors, into any server), disk
    # (through a folder that any server can read, also outside the cluster), adapters (those of `trainer.lora` alone,
    # through such a folder, for servers that serve them beside the model), or auto, which takes p2p if possible, else
    # broadcast, and logs why.
    transport: str = key(
        "auto",
        Choice("auto", "p2p", "broadcast", "disk", "adapters"),
        when(
            "adapters",
            needs("trainer.lora.rank", above(0), because="it publishes adapters alone"),
            excludes("model's attention in chunks", because="its adapters have not been compared with SGLang's"),
            excludes("rollout.external", because="servers must have been started for adapters"),
            excludes("model's vision tower", because="servers with one have not been tested with adapters"),
        ),
    )
    # Maximum size of a message, or file, in MiB; a sender holds two.
    bucket_mb: int = key(256, AT_LEAST_ONE)
    # p2p: where servers stage a version until they commit it: host (pinned memory beside a GPU), or device, which
    # shortens the pause and takes as much device memory as the weights.
    arena: str = key("host", Choice("device", "host"), *OF_P2P)
    # p2p: size of that staging area on each server rank, in MiB; null takes what a version needs. A rank with less room
    # pauses during the whole transfer.
    arena_mb: int | None = key(None, AT_LEAST_ONE, *OF_P2P)
    # p2p: number of servers that are updated concurrently; null updates all at once.
    wave: int | None = key(None, AT_LEAST_ONE, *OF_P2P)
    # p2p: send only changed elements if that is smaller. Ranks keep a host copy of what they sent last.
    delta: bool = key(
        False, *OF_P2P, excludes(".wave", because="ranks keep one version to compute deltas against; waves differ")
    )
    # p2p: every n-th sync is a full one even with `delta`; 0 never.
    delta_full_every: int = key(100, NOT_NEGATIVE, *OF_P2P)
    # disk: folder for versions that all nodes and servers share and only this run writes; null takes `sync` in the run
    # directory.
    disk_dir: str | None = key(None, PATH, unused_without(".transport", "disk", "adapters"))
    # disk: versions to keep; each is a complete Hugging Face folder.
    disk_keep: int = key(2, AT_LEAST_ONE)
    # Compare trainer and server log-probs on fixed prompts after every n-th sync; 0 never.
    parity_every: int = key(1, NOT_NEGATIVE)
    # Maximum mean absolute difference per token, in nats; null takes 1e-3 for float32 and 0.2 for bfloat16.
    parity_threshold: float | None = key(None, POSITIVE, unused_without(".parity_every", above(0)))


@dataclass
class TimeoutConfig:
    """Deadlines in seconds, one for each wait. One that contains other waits must be longer than their sum."""

    # Start of a server, the router or a rollout worker, until it answers.
    server_start: float = key(300.0, POSITIVE)
    # Start of the trainer, until every rank has loaded its weights.
    trainer_start: float = key(300.0, POSITIVE)
    # Return of a lost node, before training goes on without it (`trainer.min_data_parallel`).
    lost_node: float = key(120.0, POSITIVE)
    # One generation request, or one request to a reward model.
    request: float = key(600.0, POSITIVE, longer_than(_PROBES, _HUNG_SERVER), longer_than(_CHECKS, _HUNG_SERVER))
    # Each phase of a weight sync.
    weight_sync: float = key(
        300.0,
        POSITIVE,
        longer_than(
            ".sync_stall",
            "the deadline of the phase would expire first, and the error would not name the stalled message",
            where={"sync.transport": ("p2p", "auto")},
        ),
    )
    # One call of a reward function.
    reward: float = key(60.0, POSITIVE)
    # One call of an environment; a sign of life of a verifiers environment's server.
    environment: float = key(60.0, POSITIVE)
    # One sample of `rollout.agent`, from the start of the agent to its return; waiting for a thread does not count. Of
    # an external one, from the claim of a session to its close. One episode of a verifiers environment.
    agent: float = key(
        1500.0,
        POSITIVE,
        unused_without("run's rollout.agent or verifiers environment"),
        longer_than(
            ".request",
            "an agent would be stopped, and its prompt would count as failed, while a server may still answer it",
            where={"rollout.agent": ()},
        ),
    )
    # Silence of a program with an open session (`rollout.agent: external`), after which others get its sample.
    heartbeat: float = key(60.0, POSITIVE, unused_without("rollout.agent", EXTERNAL))
    # Reward of a session that was closed with the reward "later" (`rollout.agent: external`). Without it, the reward
    # function scores the sample, or it is dropped.
    late_reward: float = key(120.0, POSITIVE, unused_without("rollout.agent", EXTERNAL))
    # One answer of a rollout worker's event loop (`rollout.workers`). User code that blocks it for longer is taken for
    # hung: the worker is killed and replaced.
    rollout_worker: float = key(
        180.0,
        POSITIVE,
        longer_than(
            ".reward",
            "a worker whose reward function blocks its event loop would be killed within the function's deadline",
            where={"rollout.workers": above(0)},
        ),
    )
    # One message of a p2p sync without progress.
    sync_stall: float = key(30.0, POSITIVE)
    # One training step, or one save of a checkpoint. A collective of the trainer ranks (Megatron's distributed timeout)
    # may take twice that.
    train_step: float = key(1800.0, POSITIVE)
    # Watchdog: if no group finishes and no step is trained for this long, the run stops and reports what each part
    # waits for. Time in a step, a save, a restart of the ranks or a weight sync does not count, because each has a
    # deadline.
    no_progress: float = key(
        1800.0,
        POSITIVE,
        longer_than(".request + .reward", "no group finishes before its requests and its rewards"),
        longer_than(
            "2 * .request + .reward",
            "no group finishes before its requests and those to the other model",
            where={"run's other models": above(0)},
        ),
        longer_than(
            ".request + rollout.tools.timeout + .reward",
            "no group finishes before its requests, tool calls and rewards",
            where={"rollout.tools.functions": ()},
        ),
        longer_than(
            ".request + rollout.tools.timeout + .reward",
            "no group finishes before its requests, tool calls and rewards",
            where={"rollout.tools.mcp": ()},
        ),
        longer_than(
            ".request + .environment",
            "no group finishes before its requests and the environment's answers",
            where={"rollout.environment": ()},
        ),
        longer_than(
            ".agent + .reward",
            "no group finishes before its agents return and are scored",
            where={"rollout.agent": ()},
        ),
        longer_than(
            ".agent + .late_reward + .reward",
            "no group finishes before its sessions are closed, rewarded and scored",
            where={"rollout.agent": EXTERNAL},
        ),
        longer_than(
            f"{_CHECKS} + .shutdown + .server_start + .request",
            "if all servers hang, nothing finishes until one is declared dead and restarted and has answered a request",
        ),
        longer_than(
            ".rollout_worker + .server_start + .request + .reward",
            "if all rollout workers hang, nothing finishes until one is killed and replaced and has finished a group",
            where={"rollout.workers": above(0)},
        ),
    )
    # Clean exit of a process, after which it is killed.
    shutdown: float = key(60.0, POSITIVE)
