"""What was run: model, data, algorithm, pools, devices, versions, and the settings that differ from the defaults."""

from __future__ import annotations

from collections import Counter

from megasync.watch import configuration, units
from megasync.watch.document import Facts, Section, Table
from megasync.watch.run_folder import RunFolder


def setup(run: RunFolder) -> Section:
    section = Section("What was run")
    section.add(Facts(_facts(run)))
    section.add(
        Table(
            "Settings that differ from the defaults.",
            ("Key", "Value", "Default"),
            [
                (item.key, configuration.shown(item.values[0], item.key), configuration.shown(item.default, item.key))
                for item in configuration.changed(run.settings)
            ],
        )
    )
    return section


def training_data(run: RunFolder) -> str:
    """The kind and the source of the training data, or the rows that came from Python."""
    if rows := run.custom.get("train_dataset"):
        return f"{rows} from Python"
    if run.served:
        return ""
    place = "sft.train" if run.supervised else "data.train"
    parts = [run.settings.get(f"{place}.{key}") for key in ("kind", "source")]
    return "/".join(str(part) for part in parts if part)


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    get = run.settings.get
    facts = [("Model", _joined(get("model.path"), get("model.dtype"))), ("Training data", training_data(run))]
    if run.supervised:
        rows = get("sft.rows_per_step")
        facts.append(("Batch", f"{rows} rows a step" if rows else ""))
    elif run.served:
        facts.append(("Servers", _servers(run)))
    else:
        rows = run.custom.get("eval_dataset")
        held_out = _joined(get("data.eval.kind"), get("data.eval.source"), separator="/")
        facts.append(("Held-out data", f"{rows} from Python" if rows else held_out))
        facts += [(name.title(), text) for name, text in _functions(run).items()]
        facts.append(("Algorithm", _joined(get("algorithm.advantage"), get("algorithm.loss"), _correction(run))))
        facts.append(("Batch", _batch(run)))
        facts.append(("Servers", _servers(run)))
    facts.append(("Trainer", _trainer(run)))
    facts.append(("Optimizer", "" if get("trainer.optimizer.lr") is None else f"lr {get('trainer.optimizer.lr'):g}"))
    facts.append(("Devices", _devices(run)))
    if run.state is not None:
        facts.append(("Driver", _joined(f"process {run.state.pid}", f"on {run.state.host}", separator=" ")))
    facts += [(name, version) for name, version in run.versions.items()]
    facts.append(("Directory", str(run.path)))
    return [(name, text) for name, text in facts if text]


def _functions(run: RunFolder) -> dict[str, str]:
    """The names of the reward, rollout function or agent, from Python or from the configuration."""
    named = {key: run.settings.get(f"rollout.{key}") for key in ("reward", "workflow", "agent")}
    configured = {"reward": named["reward"], "rollout": named["workflow"], "agent": named["agent"]}
    functions = {name: run.custom.get(name) or value for name, value in configured.items()}
    return {name: str(text) for name, text in functions.items() if text}


def _correction(run: RunFolder) -> str | None:
    value = run.settings.get("algorithm.correction")
    return None if value is None else f"off-policy correction {value}"


def _batch(run: RunFolder) -> str:
    groups, samples = (run.settings.get(f"schedule.{key}") for key in ("groups_per_step", "samples_per_group"))
    if not isinstance(groups, int) or not isinstance(samples, int):
        return ""
    pacing = run.pacing
    bound = (
        "" if pacing is None else f"; staleness at most {pacing.staleness_bound}, {pacing.capacity} groups in flight"
    )
    return f"{groups} groups of {samples} = {groups * samples} responses a step{bound}"


def _servers(run: RunFolder) -> str:
    external = run.settings.get("rollout.external")
    count = len(external) if isinstance(external, list) and external else run.settings.get("rollout.servers")
    tensor = run.settings.get("rollout.tensor_parallel")
    if count is None:
        return ""
    split = {"tensor parallel": tensor}
    for name in ("pipeline parallel", "attention data parallel"):
        size = run.settings.get(f"rollout.{name.replace(' ', '_')}")
        split[name] = size if size != 1 else None
    return units.counted(count, "SGLang server") + "".join(f", {kind} {size}" for kind, size in split.items() if size)


def _trainer(run: RunFolder) -> str:
    sizes = {
        kind: run.settings.get(f"trainer.{kind}_parallel")
        for kind in ("tensor", "pipeline", "context", "data", "expert")
    }
    degrees = {kind: value for kind, value in sizes.items() if isinstance(value, int)}
    if not {"tensor", "pipeline", "data"} <= degrees.keys():
        return ""
    ranks = degrees["tensor"] * degrees["pipeline"] * degrees["data"] * degrees.get("context", 1)
    described = ", ".join(f"{kind} {value}" for kind, value in degrees.items() if value > 1)
    return f"{units.counted(ranks, 'Megatron rank')}{f': parallel {described}' if described else ''}"


def _devices(run: RunFolder) -> str:
    """Names the trainer's devices and counts the hosts; gives the kind of device where names were not recorded."""
    ranks, servers = (run.state.ranks, run.state.servers) if run.state is not None else ([], [])
    kinds = Counter(rank.device for rank in ranks if rank.device)
    named = [f"{count} × {name}" for name, count in kinds.items()] or [str(run.settings.get("cluster.device") or "")]
    hosts = {rank.node for rank in ranks if rank.node}
    places = [f"trainer on {units.counted(len(hosts), 'host')}"] if hosts else []
    if addresses := {server.url.rpartition(":")[0] for server in servers if server.url}:
        places.append(f"servers on {units.counted(len(addresses), 'host')}")
    return "; ".join(part for part in (" and ".join(named), ", ".join(places)) if part)


def _joined(*parts: object, separator: str = ", ") -> str:
    return separator.join(str(part) for part in parts if part)
