"""The endpoint of `megasync serve`, and what its tenants may take."""

from __future__ import annotations

from dataclasses import dataclass

from megasync.config.limits import AT_LEAST_ONE, HOST, PATH, POSITIVE, Range
from megasync.config.rules import above, at_least, excludes, key, needs, none_of, when

_ADAPTERS = "servers get the adapters of each model, and keep the model itself"
_OWN = "each model of a tenant has its own"
_PER_STEP = "the ranks' own Adam updates each model by the parameters of its step"
# What a configuration with this section needs and excludes, whatever the section says.
OF_SERVICE = when(
    none_of(None),
    needs("trainer.lora.rank", above(0), because="it is the largest rank of the adapters that are served"),
    needs("trainer.lora.alpha", 32.0, because="the protocol's adapters are multiplied by 32 / rank"),
    excludes("trainer.lora.targets", because="each model says which projections it adapts"),
    excludes("trainer.lora.path", because=_OWN),
    excludes("trainer.minibatches", because="a client decides what one optimizer step is"),
    excludes("trainer.cuda_graphs", because="they capture the scale of one model's adapters"),
    excludes("trainer.min_data_parallel", because="the ranks of a service are restarted in the same number"),
    excludes("trainer.optimizer.offload", because=_PER_STEP),
    excludes("trainer.optimizer.exp_avg_dtype", because=_PER_STEP),
    excludes("trainer.optimizer.exp_avg_sq_dtype", because=_PER_STEP),
    excludes("trainer.optimizer.store_param_remainders", because=_PER_STEP),
    needs("sync.transport", "auto", "adapters", because=_ADAPTERS),
    excludes("cluster.colocate", because="a service trains and samples at the same time"),
    excludes("rollout.external", because="servers must have been started for adapters"),
    excludes("rollout.fp8", because="servers would add adapters to quantized weights, which the trainer has not"),
    excludes("rollout.routing_replay", because="clients do not send routes"),
    excludes("model's experts", because="servers do not compute adapters of experts"),
    excludes("sft.train", because="`megasync plan` would not know which of the two it is about"),
)


@dataclass
class ServeConfig:
    """The training service of `megasync serve`, which speaks Tinker's protocol: docs/serve.md.

    Limits are of each tenant. The router's certificate (`cluster.tls_cert`) is the endpoint's too.
    """

    # Address of the endpoint; auto is this node's own.
    host: str = key("127.0.0.1", HOST)
    # Port of the endpoint; 0 picks a free one.
    port: int = key(8000, Range(0, 65535))
    # File with a line `TENANT KEY` for each tenant, whose keys begin with tml-; null makes one tenant, `local`, and
    # writes its key to `keys` in the run directory, which only this user can read.
    keys: str | None = key(None, PATH)
    # Models in memory. Those that are computed are on the device, the others are in host memory.
    models: int = key(16, AT_LEAST_ONE)
    # Adapters that servers can be asked for: of checkpoints for sampling, and of samplers. A new sampler's replaces the
    # one that was not used for longest.
    adapters: int = key(64, AT_LEAST_ONE)
    # Checkpoints, samplers and states of models on disk, in GB.
    disk_gb: float = key(200.0, POSITIVE)
    # Requests that are not answered yet. Twice as many results are kept for clients that ask again.
    promises: int = key(10_000, AT_LEAST_ONE)
    # Tokens of requests that are not answered yet; a sample counts with all that it may generate.
    tokens_in_flight: int = key(
        16_000_000, AT_LEAST_ONE, at_least("rollout.context_length", because="one sequence may be that long")
    )
    # Maximum size of a request's body in MiB, also after it is decompressed. The ledger takes no larger ones than 900.
    request_mb: int = key(64, Range(1, 900))
    # Seconds without a heartbeat after which a session's models leave the memory and its adapters the servers. They
    # come back with its next request.
    heartbeat_seconds: float = key(600.0, Range(30))
