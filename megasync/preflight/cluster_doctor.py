"""Examines all nodes of a Ray cluster together: each by itself, what must be equal on all, and the ways between them.

One actor on each node (`node_probe`) looks; nothing is left behind.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.config import Config
from megasync.config.pools import nodes_needed, pool_specs
from megasync.errors import MegasyncError
from megasync.preflight.doctor import SETUP
from megasync.preflight.finding import FAILURE, OK, WARNING, Finding
from megasync.preflight.node_probe import NodeProbe

# One look at a node imports torch there; the first one also starts a process.
LOOK_SECONDS = 180.0
REACH_SECONDS = 10.0
COLLECTIVE_SECONDS = 60.0
# Logs and deadlines of several nodes can be read together up to this.
SKEW_SECONDS = 2.0
POLL_SECONDS = 0.5

Looks = Mapping[str, dict[str, Any]]


def examine_cluster(address: str, nodes: int, wait: float, config: Config | None = None) -> list[Finding]:
    """Waits up to `wait` seconds for so many nodes, then looks. Without a `config` nothing is said of model and folders.

    Raises MegasyncError when there is no Ray at `address`.
    """
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises what it likes here
        raise MegasyncError(
            f"no Ray cluster can be joined at {address}: {type(error).__name__}: {error}; RAY_AUTH_TOKEN must be the "
            f"cluster's"
        ) from error
    try:
        there = _await_nodes(nodes, wait)
        names = [f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in there]
        if len(there) < nodes:
            fix = "look at the others' Ray logs; a firewall, or another token or version of Ray, keeps nodes out"
            return [Finding("nodes", FAILURE, f"{len(there)} of {nodes} within {wait:g} s: {', '.join(names)}", fix)]
        return [Finding("nodes", OK, ", ".join(names)), *_examine([node["NodeID"] for node in there], names, config)]
    finally:
        ray.shutdown()


def _await_nodes(nodes: int, wait: float) -> list[dict]:
    deadline = time.monotonic() + wait
    while True:
        there = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
        if len(there) >= nodes or time.monotonic() >= deadline:
            return there
        time.sleep(POLL_SECONDS)


def _examine(ids: Sequence[str], names: Sequence[str], config: Config | None) -> Iterator[Finding]:
    remote = ray.remote(NodeProbe)
    probes = {
        name: remote.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for name, node in zip(names, ids, strict=True)
    }
    looks, lost = _ask(probes, "look", LOOK_SECONDS)
    yield from lost
    for name, look in looks.items():
        for finding in look["findings"]:
            if finding["status"] != OK:
                yield Finding(f"{name}: {finding['subject']}", finding["status"], finding["detail"], finding["fix"])
    yield from _equal(looks)
    yield from _clocks(probes)
    if config is not None:
        yield from _shared(probes, config)
        yield from _sizes(looks, config)
    yield from _ways(probes, looks)


def _ask(probes: Mapping[str, Any], method: str, seconds: float, *arguments: Any) -> tuple[Looks, list[Finding]]:
    """Answers by node, and a finding for each node without one."""
    asked = {getattr(probe, method).remote(*arguments): name for name, probe in probes.items()}
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
    answers, lost = (
        {},
        [
            Finding(asked[ref], FAILURE, f"did not answer {method} within {seconds:g} s", "look at that machine")
            for ref in late
        ],
    )
    for ref in done:
        try:
            answers[asked[ref]] = ray.get(ref)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what was found out about that node
            why = str(error).strip().splitlines()[-1]
            lost.append(Finding(asked[ref], FAILURE, f"{method} failed: {why}", f"{SETUP} on that machine"))
    return answers, lost


def _equal(looks: Looks) -> Iterator[Finding]:
    """Versions and code that all nodes must have alike, by what most of them have."""
    for subject in ("python", "megasync's code", "packages", "devices"):
        values = {name: look["facts"][subject] for name, look in looks.items()}
        if len(counted := Counter(values.values())) <= 1:
            yield Finding(f"same {subject}", OK, next(iter(counted), "nobody answered"))
            continue
        usual = counted.most_common(1)[0][0]
        other = {name: value for name, value in values.items() if value != usual}
        for name, value in other.items():
            yield Finding(
                f"same {subject}",
                FAILURE,
                f"{name} has {_difference(value, usual)}",
                "bring all machines to the same checkout and environment, best by a folder that they share",
            )


def _difference(value: str, usual: str) -> str:
    """What one list of words has that the other has not."""
    mine, theirs = value.split(", "), usual.split(", ")
    odd = [word for word in mine if word not in theirs]
    return f"{', '.join(odd) or 'less'}, others {', '.join(word for word in theirs if word not in mine) or 'less'}"


def _clocks(probes: Mapping[str, Any]) -> Iterator[Finding]:
    """Each clock against this one's; the way there and back bounds the error."""
    worst, where = 0.0, ""
    for name, probe in probes.items():
        before = time.time()
        answers, _ = _ask({name: probe}, "clock", REACH_SECONDS)
        after = time.time()
        for there in answers.values():
            worst, where = max((worst, where), (max(before - there, there - after, 0.0), name))
    fix = "" if worst <= SKEW_SECONDS else "let all machines keep time by NTP or chrony"
    at = f" at {where}" if where else ""
    yield Finding("clocks", WARNING if fix else OK, f"at most {worst:.1f} s apart{at}", fix)


def _shared(probes: Mapping[str, Any], config: Config) -> Iterator[Finding]:
    """Whether every node sees the folder of the runs and the model."""
    root = Path(config.run_root).absolute()
    note = root / f".doctor-{secrets.token_hex(8)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        note.write_text(note.name)
        seen, _ = _ask(probes, "reads", REACH_SECONDS * 3, str(note))
    except OSError as error:
        yield Finding("run folder", FAILURE, f"{root}: {error}", "set run_root to a folder that can be written")
        return
    finally:
        note.unlink(missing_ok=True)
    blind = [name for name, text in seen.items() if text != note.name]
    yield Finding(
        "run folder",
        FAILURE if blind else OK,
        f"{root} is not the same folder on {', '.join(blind)}" if blind else f"{root}, the same on all nodes",
        "set run_root to a folder on a file system that all machines share" if blind else "",
    )
    model = str((Path(config.model.path) / "config.json").absolute())
    seen, _ = _ask(probes, "reads", REACH_SECONDS * 3, model)
    blind = [name for name, text in seen.items() if text is None]
    yield Finding(
        "model",
        FAILURE if blind else OK,
        f"{model} cannot be read on {', '.join(blind)}" if blind else f"{config.model.path}, on all nodes",
        "copy the model to the same path there, or name a shared folder in model.path" if blind else "",
    )


def _sizes(looks: Looks, config: Config) -> Iterator[Finding]:
    per_node = config.cluster.devices_per_node
    needed = nodes_needed(pool_specs(config), per_node)
    enough = needed <= len(looks)
    yield Finding(
        "size",
        OK if enough else FAILURE,
        f"the pools take {needed} node(s) of {per_node} devices; there are {len(looks)}",
        "" if enough else "add machines, or lower trainer.data_parallel or rollout.servers",
    )
    if config.cluster.device != "cpu":
        for name, look in looks.items():
            if 0 < look["gpus"] < per_node:
                fix = f"set cluster.devices_per_node={look['gpus']}"
                yield Finding(name, FAILURE, f"has {look['gpus']} GPUs, cluster.devices_per_node={per_node}", fix)


def _ways(probes: Mapping[str, Any], looks: Looks) -> Iterator[Finding]:
    """Every node to every other by TCP, and one small all-reduce over all of them, on the addresses that runs use."""
    listening, lost = _ask(probes, "listen", REACH_SECONDS)
    yield from lost
    reached, lost = _ask(probes, "connect", REACH_SECONDS * (len(listening) + 1), listening, REACH_SECONDS)
    yield from lost
    broken = [f"{name} to {to}: {why}" for name, failures in reached.items() for to, why in failures.items()]
    yield Finding(
        "ways between nodes",
        FAILURE if broken else OK,
        "; ".join(broken) if broken else f"{len(reached)} nodes reach each other at {_places(listening)}",
        "open the firewall between the machines for all ports, or name their network: --interface" if broken else "",
    )
    if broken or lost or len(probes) < 2:
        return
    first = next(iter(probes))
    meeting, lost = _ask({first: probes[first]}, "meeting_point", LOOK_SECONDS, COLLECTIVE_SECONDS)
    yield from lost
    if lost:
        return
    ranks = {
        probe.all_reduce.remote(*meeting[first], rank, len(probes), COLLECTIVE_SECONDS): name
        for rank, (name, probe) in enumerate(probes.items())
    }
    done, late = ray.wait(list(ranks), num_returns=len(ranks), timeout=COLLECTIVE_SECONDS * 2)
    failures = [f"{ranks[ref]} did not finish" for ref in late]
    for ref in done:
        try:
            ray.get(ref)
        except Exception as error:  # noqa: BLE001 - as above
            failures.append(f"{ranks[ref]}: {str(error).strip().splitlines()[-1]}")
    yield Finding(
        "all-reduce over gloo",
        FAILURE if failures else OK,
        "; ".join(failures) or f"over {len(probes)} nodes",
        "the interface of GLOO_SOCKET_IFNAME must lead to all machines; name it: --interface" if failures else "",
    )


def _places(listening: Mapping[str, tuple[str, int]]) -> str:
    return ", ".join(host for host, _ in listening.values())
