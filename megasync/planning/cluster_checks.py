"""Checks across machines: each machine on its own, what must be equal on all, and the network between them.

Without Ray: `Nodes` calls a `NodeProbe` on each machine, and every check is a function of the answers. A node that does
not answer is reported as a finding, and the others are still examined.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from megasync.config import Config
from megasync.config.pools import nodes_needed, pool_specs
from megasync.planning.doctor import SETUP
from megasync.planning.finding import FAILURE, OK, WARNING, Finding, verdict

# The first call starts a process on the node and imports torch there.
LOOK_SECONDS = 180.0
REACH_SECONDS = 10.0
COLLECTIVE_SECONDS = 60.0
# Up to this clock skew, logs and deadlines of several nodes are comparable.
SKEW_SECONDS = 2.0

Answers = dict[str, Any]


class Nodes(Protocol):
    """A `NodeProbe` on each of the machines in `names`, in a fixed order."""

    @property
    def names(self) -> Sequence[str]: ...

    def ask(self, method: str, seconds: float, arguments: Mapping[str, tuple]) -> tuple[Answers, dict[str, str]]:
        """Calls a method on the nodes in `arguments` concurrently: answers by node, and for the others the reason."""
        ...


def examine_nodes(nodes: Nodes, config: Config | None) -> Iterator[Finding]:
    """All findings. Without a `config`, model, folders and sizes are not checked."""
    looks, lost = _ask(nodes, "look", LOOK_SECONDS, None if config is None else _from_anywhere(config))
    yield from lost
    for name, look in looks.items():
        yield from _node_findings(name, look["findings"])
    yield from _equal(looks)
    yield from _clocks(nodes)
    if config is not None:
        yield from _shared(nodes, config)
        yield from _sizes(looks, config)
    yield from _network(nodes, looks)


def _from_anywhere(config: Config) -> Config:
    """The configuration with absolute paths."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    reward, auxiliary, teachers = (
        {name: replace(model, path=absolute(model.path)) for name, model in models.items()}
        for models in (config.reward_models, config.auxiliary_models, config.teachers)
    )
    model = replace(config.model, path=absolute(config.model.path))
    frozen = {"reward_models": reward, "auxiliary_models": auxiliary, "teachers": teachers}
    return replace(config, model=model, run_root=absolute(config.run_root), **frozen)


def _ask(nodes: Nodes, method: str, seconds: float, *arguments: Any) -> tuple[Answers, list[Finding]]:
    """Calls a method on all nodes: answers by node, and a finding for each node without one."""
    answers, lost = nodes.ask(method, seconds, dict.fromkeys(nodes.names, arguments))
    return answers, [
        Finding(name, FAILURE, f"{method}: {why}", f"check that machine, or {SETUP} there")
        for name, why in lost.items()
    ]


def _node_findings(name: str, findings: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """A machine's findings about itself: all problems, or one line if there is none."""
    problems = [Finding(**values) for values in findings if values["status"] != OK]
    for problem in problems:
        yield replace(problem, subject=f"{name}: {problem.subject}")
    if not problems:
        active = sum(
            values["detail"].startswith("active") for values in findings if values["subject"].startswith("patch ")
        )
        yield Finding(name, OK, f"{len(findings)} of its checks passed; {active} patches active")


def _equal(looks: Answers) -> Iterator[Finding]:
    """Checks versions and code against the majority of nodes. Different devices are only a warning."""
    for subject, gravity in (
        ("python", FAILURE),
        ("megasync's code", FAILURE),
        ("packages", FAILURE),
        ("devices", WARNING),
    ):
        values = {name: look["facts"][subject] for name, look in looks.items()}
        if len(counted := Counter(values.values())) <= 1:
            yield Finding(f"same {subject}", OK, next(iter(counted), "no node answered"))
            continue
        usual = counted.most_common(1)[0][0]
        fix = "use the same checkout and environment on all machines, best in a shared folder"
        if gravity == WARNING:
            fix = "give each pool machines of the same kind: --hosts h1=trainer,h2=rollout"
        for name, value in values.items():
            if value != usual:
                yield Finding(f"same {subject}", gravity, f"{name} has {_difference(value, usual)}", fix)


def _difference(value: str, usual: str) -> str:
    """How a comma-separated value differs from the usual one."""
    words, others = value.split(", "), usual.split(", ")
    extra, missing = ([word for word in one if word not in two] for one, two in ((words, others), (others, words)))
    return f"{', '.join(extra) or 'fewer'}, others have {', '.join(missing) or 'fewer'}"


def _clocks(nodes: Nodes) -> Iterator[Finding]:
    """Compares each clock with this one; the round-trip time bounds the error."""
    worst, where = 0.0, ""
    for name in nodes.names:
        before = time.time()
        answers, _ = nodes.ask("clock", REACH_SECONDS, {name: ()})
        after = time.time()
        for there in answers.values():
            worst, where = max((worst, where), (max(before - there, there - after, 0.0), name))
    detail = f"at most {worst:.1f} s apart{f' at {where}' if where else ''}"
    yield verdict("clocks", worst <= SKEW_SECONDS, detail, "synchronize all clocks by NTP or chrony", WARNING)


def _shared(nodes: Nodes, config: Config) -> Iterator[Finding]:
    """Checks that every node sees the same run folder. Whether it can read the model each node checks itself."""
    root = Path(config.run_root).expanduser().absolute()
    note = root / f".doctor-{secrets.token_hex(8)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        note.write_text(note.name)
    except OSError as error:
        yield Finding("shared run folder", FAILURE, f"{root}: {error}", "set run_root to a writable folder")
        return
    try:
        seen, lost = _ask(nodes, "reads", REACH_SECONDS * 3, str(note))
    finally:
        note.unlink(missing_ok=True)
    yield from lost
    others = [name for name, text in seen.items() if text != note.name]
    detail = f"{root} is not the same folder on {', '.join(others)}" if others else f"{root}, the same on all nodes"
    fix = "set run_root to a folder on a file system that all machines share"
    yield verdict("shared run folder", not others, detail, fix)


def _sizes(looks: Answers, config: Config) -> Iterator[Finding]:
    per_node = config.cluster.devices_per_node
    needed = nodes_needed(pool_specs(config), per_node)
    detail = f"the pools need {needed} node(s) of {per_node} devices; there are {len(looks)}"
    fix = "add machines, or lower trainer.data_parallel or rollout.servers"
    yield verdict("size", needed <= len(looks), detail, fix)
    if config.cluster.device == "cpu" or not any(look["gpus"] for look in looks.values()):
        return
    fewest = min(look["gpus"] for look in looks.values() if look["gpus"])
    for name, look in looks.items():
        if look["gpus"] < per_node:
            fix = "repair its GPU driver, or exclude this machine"
            if look["gpus"]:
                fix = f"set cluster.devices_per_node={fewest}, which applies to all machines, or exclude this one"
            yield Finding(f"{name}: gpus", FAILURE, f"{look['gpus']}, cluster.devices_per_node={per_node}", fix)


def _network(nodes: Nodes, looks: Answers) -> Iterator[Finding]:
    """Checks TCP between all pairs of nodes, and a small all-reduce over all, on the addresses that runs use."""
    listening, lost = _ask(nodes, "listen", REACH_SECONDS)
    yield from lost
    reached, lost_too = _ask(nodes, "connect", REACH_SECONDS * (len(listening) + 1), listening, REACH_SECONDS)
    yield from lost_too
    broken = [f"{name} to {to}: {why}" for name, failures in reached.items() for to, why in failures.items()]
    hosts = ", ".join(host for host, _ in listening.values())
    detail = "; ".join(broken) or f"{len(reached)} nodes reach each other at {hosts}"
    fix = "open the firewall between the machines for all ports, or select their network with --interface"
    yield verdict("network between nodes", not broken, detail, fix)
    if broken or lost or lost_too or len(nodes.names) < 2:
        return
    yield from _all_reduce(nodes, "gloo")
    if looks and all(look["gpus"] for look in looks.values()):
        yield from _all_reduce(nodes, "nccl")


def _all_reduce(nodes: Nodes, backend: str) -> Iterator[Finding]:
    """Checks an all-reduce; `nccl` uses the first GPU of each node."""
    first = nodes.names[0]
    meeting, lost = nodes.ask("meeting_point", COLLECTIVE_SECONDS, {first: (COLLECTIVE_SECONDS,)})
    if not lost:
        world = len(nodes.names)
        ranks = {
            name: (backend, *meeting[first], rank, world, COLLECTIVE_SECONDS) for rank, name in enumerate(nodes.names)
        }
        _, lost = nodes.ask("all_reduce", COLLECTIVE_SECONDS * 2, ranks)
    detail = "; ".join(f"{name}: {why}" for name, why in lost.items()) or f"over {len(nodes.names)} nodes"
    fix = f"the interface of {backend.upper()}_SOCKET_IFNAME must route to all machines; select it with --interface"
    if backend == "nccl":
        fix += "; NCCL_DEBUG=INFO logs more"
    yield verdict(f"all-reduce over {backend}", not lost, detail, fix)
