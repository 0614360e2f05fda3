"""Renders plans and findings as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby, zip_longest
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megasync.base.files import bytes_text, scaled
from megasync.config.access import describe_access
from megasync.config.pools import engines, server_slots
from megasync.config.schema import Config, RolloutConfig
from megasync.layout.routes import RouteFormat
from megasync.models.hub import with_names
from megasync.observe.metrics import METRICS_FILE
from megasync.planning.finding import FAILURE, OK, WARNING, Finding
from megasync.planning.memory import HostMemory, RankMemory, ServerMemory, longest_sequence, microbatch_tokens
from megasync.planning.plan import Plan, PlannedPool, PlannedRank, TrainerPlan

# Nodes with more devices than this show them in runs.
CELLS = 16
TURNS = "ranks and servers use them in turns: for each step the servers free theirs, and for generation the ranks"


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row per finding, with its fix."""
    styles = {OK: "green", WARNING: "yellow", FAILURE: "red"}
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")  # never truncate a long path
    for finding in findings:
        detail = finding.detail if not finding.fix else f"{finding.detail}\n-> {finding.fix}"
        table.add_row(Text(finding.status, style=styles[finding.status]), Text(finding.subject), Text(detail))
    return table


def plan_tables(plan: TrainerPlan, left_out: Sequence[str] = ()) -> RenderableType:
    """All tables and messages about a plan, separated by empty lines.

    `left_out` names what could not be checked because it is not on this machine.
    """
    parts: list[RenderableType]
    if isinstance(plan, Plan):
        summary = _summary if plan.config.serve is None else _service
        parts = [summary(plan), _pools(plan), _nodes(plan), _ranks(plan), _memory(plan)]
        if plan.frozen_models or not plan.config.rollout.external:
            parts.append(_server(plan))
    else:
        parts = [_supervised(plan), _ranks(plan), _memory(plan)]
    if left_out:
        parts.append(Text(f"not on this machine, so the run itself will check it: {', '.join(left_out)}"))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in plan.warnings]
    parts += [Text(f"does not fit: {refusal}", style="bold red") for refusal in plan.refusals]
    if isinstance(plan, Plan) and plan.refusals and plan.nearest is None:
        parts.append(Text("no other split that was tried fits: use devices with more memory", style="bold red"))
    elif isinstance(plan, Plan) and plan.nearest:
        parts.append(Text(f"nearest configuration that fits: {' '.join(plan.nearest)}", style="bold"))
    return Group(*(Padding(part, (1, 0, 0, 0)) if at else part for at, part in enumerate(parts)))


def _summary(plan: Plan) -> Table:
    config, pacing = plan.config, plan.pacing
    schedule, rollout = config.schedule, config.rollout
    workers, nodes = config.rollout.workers, plan.rollout.spec.nodes
    teachers = [
        f"{name} ({model.path}) for {', '.join(model.sources) or 'all other rows'}"
        for name, model in config.teachers.items()
    ]
    shared = f"{workers} processes on {min(workers, nodes)} node(s) of the rollout pool"
    rows = {
        "run": config.name,
        **_model(plan),
        "step": f"{schedule.groups_per_step * schedule.samples_per_group} responses, {_microbatches(config)}",
        "buffer": f"at most {pacing.capacity} active groups, {plan.max_inflight} of them in generation",
        **({} if not workers else {"rollout workers": shared}),
        "staleness": f"trained tokens are at most {pacing.staleness_bound} version(s) old, {pacing.window_slack} of "
        f"them due to the look-ahead window; staler groups: {schedule.stale}",
        **({"teachers": "; ".join(teachers)} if teachers else {}),
        "weight sync": f"every {schedule.weight_sync_steps} step(s): {bytes_text(plan.broadcast.nbytes)} "
        f"{_transport(plan)}",
        "fleet": _fleet(rollout),
        **({"devices": TURNS} if config.cluster.colocate else {}),
        "host memory": _host_memory(plan.host),
        **_cpu_memory(plan),
        "access": describe_access(config.cluster),
        "metrics": _metrics(config),
    }
    form = RouteFormat.of(plan.layout.hf_config) if rollout.routing_replay else None
    if form is not None:
        tokens = pacing.capacity * schedule.samples_per_group * longest_sequence(config)
        rows["routing replay"] = (
            f"{bytes_text(form.nbytes)} a token of prompts and responses, at most {bytes_text(tokens * form.nbytes)} "
            f"in the buffer; servers report {bytes_text(form.text_bytes)} a token"
        )
    if any(stage.reference for stage in plan.stages):
        kept = bytes_text(max(stage.weights for stage in plan.stages))
        rows["reference"] = (
            f"initial weights in host memory, at most {kept} a rank; scoring copies them to the device in blocks"
        )
    return facts(rows)


def _service(plan: Plan) -> Table:
    config, serve = plan.config, plan.config.serve
    assert serve is not None
    adapters = plan.adapters
    count = 0 if adapters is None else sum(prod(shape) for shape in adapters.hf_tensors.values())
    trust = "plain HTTP" if config.cluster.tls_cert is None else "TLS"
    keys = "one tenant, whose key is drawn" if serve.keys is None else f"tenants and keys of {serve.keys}"
    return facts(
        {
            "run": f"{config.name}, a training service (`megasync serve`), because serve is set",
            **_model(plan),
            "adapters": f"of each model its own, of rank {config.trainer.lora.rank} at most, of all projections and "
            f"the output layer: {_count(count)} parameters",
            "endpoint": f"{serve.host}, port {serve.port or 'any'}, by {trust}; {keys}",
            "a tenant": f"at most {serve.models} models in memory, {serve.adapters} adapters on servers, "
            f"{serve.disk_gb:g} GB on disk, {serve.promises:,} requests with {serve.tokens_in_flight:,} tokens waiting",
            "sequences": f"at most {longest_sequence(config)} tokens, {_microbatches(config)}",
            "fleet": _fleet(config.rollout),
            "host memory": _host_memory(plan.host),
            **_cpu_memory(plan),
            "access": describe_access(config.cluster),
            "metrics": _metrics(config),
        }
    )


def _fleet(rollout: RolloutConfig) -> str:
    lost = f"at most {tokens} token(s)" if (tokens := rollout.stream_interval) else "all tokens"
    return (
        f"continues with at least {rollout.min_servers} of {rollout.servers} server(s){_engines(rollout)}; each "
        f"{'is waited for' if rollout.external else 'restarts'} up to {rollout.health.restarts} time(s) in "
        f"{rollout.health.restart_window:g} s; a server that dies loses {lost} of each request it runs"
    )


def _model(plan: TrainerPlan) -> dict[str, str]:
    path, sizes, dtype = plan.config.model.path, plan.layout.sizes, plan.config.model.dtype
    name = with_names(plan.config).model.path
    return {
        "model": name if plan.source.parent == Path(path).expanduser() else f"{path} (sizes from {plan.source})",
        "size": f"{_count(plan.parameters)} parameters in {dtype}: {sizes.layers} layers, hidden "
        f"{sizes.hidden}, {sizes.heads} heads, {sizes.groups} KV heads, vocabulary {sizes.vocab}"
        + (", tied embeddings" if sizes.tied else ""),
        **_adapters(plan),
    }


def _adapters(plan: TrainerPlan) -> dict[str, str]:
    """The adapters that are trained, and those of held-out sets."""
    rows, lora, layout = {}, plan.config.trainer.lora, plan.adapters
    if layout is not None:
        count = sum(prod(shape) for shape in layout.hf_tensors.values())
        start = "" if lora.path is None else f", from {lora.path}"
        rows["adapters"] = (
            f"rank {layout.shape.rank}, alpha {lora.alpha:g}, of {', '.join(layout.shape.targets)}: {_count(count)} "
            f"parameters are trained{start}"
        )
    held_out = {name: each.adapter for name, each in plan.config.eval.sets.items() if each.adapter is not None}
    if held_out:
        rows["held-out adapters"] = ", ".join(f"{path} for the set {name}" for name, path in held_out.items())
    return rows


def _cpu_memory(plan: Plan) -> dict[str, str]:
    """What the pools of a run on CPUs hold, besides programs."""
    if not (pools := plan.cpu_memory):
        return {}
    listed = ", ".join(f"{bytes_text(nbytes)} for {key}" for key, nbytes in pools.items())
    return {"pools' memory": f"about {bytes_text(sum(pools.values()))} besides programs: {listed}"}


def _microbatches(config: Config) -> str:
    most = "" if config.trainer.pad_microbatches else "at most "
    return f"in microbatches of {most}{microbatch_tokens(config)} tokens per rank"


def _metrics(config: Config) -> str:
    """One sentence that says where the metrics of a run go."""
    observe = config.observe
    places = [METRICS_FILE] + ["TensorBoard"] * observe.tensorboard
    if (wandb := observe.wandb) is not None and wandb.mode != "disabled":
        project = wandb.project if wandb.entity is None else f"{wandb.entity}/{wandb.project}"
        places.append(f"Weights & Biases ({project}, {wandb.mode})")
    if (mlflow := observe.mlflow) is not None:
        uri = "MLFLOW_TRACKING_URI" if mlflow.tracking_uri is None else urlsplit(mlflow.tracking_uri).geturl()
        places.append(f"MLflow (experiment {mlflow.experiment} at {uri})")
    if (prometheus := observe.prometheus) is not None:
        port = f"port {prometheus.port}" if prometheus.port else "a free port"
        places.append(f"Prometheus (scrapes {prometheus.host}, {port})")
    return ", ".join(places)


def _supervised(plan: TrainerPlan) -> Table:
    config, sft, pool = plan.config, plan.config.sft, plan.trainer
    validated = f"every {every} step(s), first and last" if (every := sft.validate_every_steps) else "first and last"
    return facts(
        {
            "run": f"{config.name}, supervised (`megasync sft`), because sft.train is set",
            **_model(plan),
            "step": f"{sft.rows_per_step} rows, {_microbatches(config)}",
            "rows": f"at most {longest_sequence(config)} tokens each "
            f"({'the context of the model' if sft.max_tokens is None else 'sft.max_tokens'}), {sft.epochs} epoch(s)"
            + ("" if sft.validation is None else f"; held-out loss {validated}"),
            "processes": f"{pool.spec.slots} trainer rank(s) on node(s) {', '.join(map(str, pool.nodes))}, no servers",
            "host memory": _host_memory(plan.host),
            "metrics": _metrics(config),
        }
    )


def _host_memory(memory: HostMemory) -> str:
    parts = {
        "the copy of a checkpoint that is being written": memory.checkpoint,
        "the reference's weights": memory.reference,
        "the next weights of servers": memory.staging,
        "what is offloaded in turns": memory.offloaded,
        "the optimizer's state that is updated there": memory.optimizer,
        "models of a tenant": memory.models,
        "adapters that servers keep": memory.adapters,
    }
    listed = ", ".join(f"{bytes_text(nbytes)} for {what}" for what, nbytes in parts.items() if nbytes)
    return f"at most {bytes_text(memory.total)} on a node besides programs and data: {listed}"


def _engines(rollout: RolloutConfig) -> str:
    """The kinds of engines of each server, if there are several."""
    if engines(rollout) == 1:
        return ""
    return f" of {rollout.prefill_engines} prefill and {rollout.decode_engines} decode engine(s)"


def _transport(plan: Plan) -> str:
    """How the weights get to the servers."""
    ranks = f"rank(s) {', '.join(map(str, plan.broadcast.senders))}"
    largest = max(bucket.nbytes for bucket in plan.broadcast.buckets)
    buckets = f"in {len(plan.broadcast.buckets)} bucket(s) of at most {bytes_text(largest)}"
    if plan.config.cluster.colocate and plan.config.sync.transport != "disk":
        return "shard to shard, copied from the ranks' memory to the servers'"
    parts = plan.config.rollout.pipeline_parallel * engines(plan.config.rollout)
    fallback = "" if parts > 1 else f"; if servers cannot take that, by broadcast {buckets}, sent by {ranks}"
    return {
        "p2p": "shard to shard, from all ranks",
        "broadcast": f"by broadcast {buckets}, sent by {ranks}",
        "adapters": f"through a folder {buckets}, written by {ranks}",
        "disk": f"through a folder {buckets}, written by {ranks}",
        "auto": f"shard to shard, from all ranks{fallback}",
    }[plan.config.sync.transport]


def facts(rows: Mapping[str, str]) -> Table:
    """A table of names in bold and their values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _pools(plan: Plan) -> Table:
    table = Table(title=f"Pools on {plan.nodes} node(s)", title_justify="left")
    for column in ("pool", "processes", "devices each", "devices", "nodes"):
        table.add_column(column)
    table.add_row(*_pool_row("trainer", "rank(s)", plan.trainer))
    what = "server(s)" if server_slots(plan.config) == 1 else "server process(es)"
    table.add_row(*_pool_row("rollout", what, plan.rollout, shared=bool(plan.rollout.spec.within)))
    for model in plan.frozen_models:
        name = f"rollout, for {model.name}" if model.shared else model.pool.spec.name
        table.add_row(*_pool_row(name, f"{model.kind} server(s)", model.pool, shared=model.shared))
    return table


def _pool_row(name: str, what: str, pool: PlannedPool, shared: bool = False) -> tuple[str, ...]:
    nodes = ", ".join(map(str, pool.nodes))
    total = "shared" if shared else f"{pool.spec.total_devices:g}"
    return name, f"{pool.spec.slots} {what}", str(pool.spec.devices), total, nodes


def _nodes(plan: Plan) -> Table:
    """The owner of each device, node by node. Which device of its node a process gets is up to Ray."""
    owners = [("t", "trainer rank", plan.trainer), ("s", "server", plan.rollout)]
    apart = [model for model in plan.frozen_models if not model.shared]
    owners += [(f"m{number}.", f"server of {model.name}", model.pool) for number, model in enumerate(apart)]
    title = ", ".join(f"{sign} {what}" for sign, what, _ in owners)
    table = Table(title=f"Devices of each node: {title}, . free", title_justify="left", show_header=False)
    for node in range(plan.nodes):
        held = [cell for sign, _, pool in owners for cell in _held(sign, pool, node)]
        cluster, ranks = plan.config.cluster, len(_held("t", plan.trainer, node))
        if cluster.share_device or cluster.colocate:
            servers = _held("s", plan.rollout, node)
            both = zip_longest(held[:ranks], servers, fillvalue="")
            held = ["+".join(filter(None, pair)) for pair in both] + held[ranks + len(servers) :]
        held += ["."] * (plan.config.cluster.devices_per_node - len(held))
        table.add_row(f"node {node}", *_cells(held))
    return table


def _held(sign: str, pool: PlannedPool, node: int) -> list[str]:
    """The cells of the pool's devices on this node."""
    slots = [slot for slot in range(pool.spec.slots) if pool.node_of(slot) == node]
    return [f"{sign}{slot}" for slot in slots for _ in range(pool.spec.devices)]


def _cells(held: list[str]) -> list[str]:
    """One cell per device, or for nodes with many devices, one per run of the same owner."""
    if len(held) <= CELLS:
        return held
    runs = [[*run] for _, run in groupby(held, key=lambda cell: cell.rstrip("0123456789"))]
    return [run[0] if run[0] == run[-1] else f"{run[0]} to {run[-1]}" for run in runs]


def _ranks(plan: TrainerPlan) -> Table:
    """One row per tensor-parallel group; its ranks are consecutive."""
    experts = ("expert", "expert tensor") if plan.layout.sizes.experts else ()
    table = Table(title="Trainer ranks", title_justify="left")
    context = ("context",) if plan.layout.topology.context > 1 else ()
    for column in ("ranks", "node", "tensor", *context, "data", "pipeline", *experts, "layers"):
        table.add_column(column)

    def group(rank: PlannedRank) -> tuple[int, ...]:
        return rank.node, rank.coords.cp, rank.coords.dp, rank.coords.pp

    for (node, cp, dp, pp), members in groupby(plan.ranks, key=group):
        ranks = list(members)
        places = [rank.experts for rank in ranks if rank.experts is not None]
        table.add_row(
            _span([rank.rank for rank in ranks]),
            str(node),
            _span([rank.coords.tp for rank in ranks]),
            *([str(cp)] if context else ()),
            str(dp),
            str(pp),
            *([_span([place.ep for place in places]), _span([place.etp for place in places])] if places else ()),
            ", ".join(_span(layers) for layers in ranks[0].layers),
        )
    return table


def _memory(plan: TrainerPlan) -> Table:
    limit = "" if plan.device_bytes is None else f" of {bytes_text(plan.device_bytes)}"
    title = f"Memory of a trainer rank{limit} (activations and logits are estimates)"
    # Compact, so that it fits into 80 columns.
    table = Table(title=title, title_justify="left", collapse_padding=True, pad_edge=False)
    table.add_column("stage")
    rare = ("reference", "critic", "sync_buckets")
    names = [field.name for field in fields(RankMemory)]
    columns = [name for name in names if name not in rare or any(getattr(each, name) for each in plan.stages)]
    columns.append("total")
    for column in columns:
        table.add_column(column.replace("_", "\n"), justify="right")
    for stage, memory in enumerate(plan.stages):
        table.add_row(str(stage), *(bytes_text(getattr(memory, column)) for column in columns))
    return table


def _server(plan: Plan) -> Table:
    table = Table(title="Memory of a server rank", title_justify="left")
    # The owner is obvious if there is only one kind of server.
    of = [] if plan.config.rollout.external else [("rollout", plan.server)]
    of += [(model.name, model.memory) for model in plan.frozen_models]
    if len(of) > 1:
        table.add_column("of")
    adapters = ("adapters",) if plan.server.adapters else ()
    for column in ("weights", *adapters, "arena", "KV per token", "KV room", "KV tokens", "from"):
        table.add_column(column, justify="left" if column == "from" else "right", overflow="fold")
    for name, server in of:
        cells = _server_cells(server)
        if adapters:
            cells.insert(1, bytes_text(plan.server.adapters))
        table.add_row(*([name, *cells] if len(of) > 1 else cells))
    return table


def _server_cells(server: ServerMemory | None) -> list[str]:
    if server is None:
        return ["-"] * 5 + ["the model is not on this machine"]
    sizes = (server.weights, server.arena, server.kv_bytes_per_token, server.kv_room)
    return [*(bytes_text(size) if size else "-" for size in sizes), f"{server.kv_tokens:,}", server.kv_source]


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)}-{max(numbers)}"


def _count(count: int) -> str:
    return scaled(count, ("B", "M", "k"), "")
