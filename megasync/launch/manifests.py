"""Files that start a run elsewhere: a KubeRay RayJob, a Kubernetes Job, a SkyPilot task, a Slurm script.

Each is rendered from the same plan that `megasync plan` shows, as data, and holds no secret: the variables that hold
one come from a Secret, or from whoever submits the file. The commands inside are those of `launcher.Job`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from megasync.base.confidential import masked, masked_text
from megasync.config.host import HOST_VARIABLE
from megasync.config.pools import NODE_POOLS, NODE_RESOURCE_AMOUNT, devices_needed, node_resource, pool_specs
from megasync.errors import ConfigError
from megasync.launch.hosts import Host
from megasync.launch.launcher import HEAD_PORT, TOKEN_VARIABLE, Job
from megasync.launch.preemption import UNFINISHED
from megasync.planning.plan import Plan

KUBERAY, KUBERNETES_JOB, SKYPILOT, SLURM = TARGETS = ("kuberay", "job", "skypilot", "slurm")
# What the processes of a device take beside their tensors: the code of torch, Megatron or SGLang.
DEVICE_BYTES = 2 * 10**9
# The checkout in the image, and the user that it runs as (Dockerfile, launch/image.sh).
IMAGE_FOLDER = "/opt/megasync"
IMAGE_USER = 10001
# The longest name with which KubeRay can still name what belongs to a RayJob; a Job could have a longer one.
LONGEST_NAME = 47
NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
# Shared memory of a node with GPUs and of one without: for NCCL, torch and Ray's object store.
SHARED_MEMORY = {"cuda": "16Gi", "cpu": "2Gi"}
# Seconds in which all nodes must have joined. Before that, an image of many GB may have to be pulled on some.
JOIN_SECONDS = 1800.0
# How often a scheduler starts a run again that has failed. Each time it continues from its last checkpoint.
RETRIES = 6
# Seconds that a pod has beside those in which its run finishes a step and saves.
GRACE_SECONDS = 60
# Ray's ports for its dashboard, which takes jobs, and for the agent that every node has beside it.
DASHBOARD_PORT, AGENT_PORT = 8265, 52365
# Exists while a node's Ray runs. Where nodes find their ports themselves there is nothing to connect to.
RAYLET_SOCKET = "/tmp/ray/session_latest/sockets/raylet"
PYTHON = "python"
# The part of launch/slurm.sbatch that no configuration changes.
SLURM_OPTIONS = (
    "--ntasks-per-node=1",
    "--requeue",
    "--open-mode=append",
    "--output=slurm-%j.out",
    "--signal=B:USR1@300",
)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of a plan that are alike; `pool` is what they are reserved for, "" if that is open."""

    name: str
    pool: str
    nodes: int


@dataclass(frozen=True)
class Deployment:
    """A run for a scheduler; `deployment` makes one, and refuses what a scheduler would."""

    plan: Plan
    config_file: Path
    # Overrides as `key=value`.
    changes: list[str]
    image: str
    # The claim of a shared volume, and where it is mounted; "" without one.
    claim: str
    mount: str
    # Where CONFIG and what it names are in the image, or on the volume.
    folder: str
    # What a cloud calls its GPUs.
    gpu: str

    @property
    def name(self) -> str:
        return self.plan.config.name

    @property
    def on_gpus(self) -> bool:
        return self.plan.config.cluster.device == "cuda"

    @property
    def continue_file(self) -> str:
        return str(PurePosixPath(self.plan.config.run_root) / f"{self.name}.run")

    @property
    def groups(self) -> list[NodeGroup]:
        """The plan's nodes. Trainer ranks and servers have nodes of their own unless all fit on one node."""
        if self.plan.nodes == 1:
            return [NodeGroup("node", "", 1)]
        pools = dict(zip(NODE_POOLS, (self.plan.trainer, self.plan.rollout), strict=True))
        groups = [NodeGroup(name, name, len(pool.nodes)) for name, pool in pools.items()]
        others = self.plan.nodes - sum(group.nodes for group in groups)
        return [*groups, *([NodeGroup("models", "", others)] if others else [])]

    @property
    def devices(self) -> int:
        """Devices of a node: all of them where they are GPUs."""
        per_node = self.plan.config.cluster.devices_per_node
        return per_node if self.on_gpus else min(per_node, devices_needed(pool_specs(self.plan.config)))

    @property
    def memory(self) -> str:
        """The memory that the processes of the fullest node take, as a request of Kubernetes."""
        processes = DEVICE_BYTES * self.devices
        return f"{-(-(self.plan.host.total + sum(self.plan.cpu_memory.values()) + processes) // 2**30)}Gi"

    @property
    def job(self) -> Job:
        """The run's commands, with the names that hosts have in a Kubernetes Job."""
        pools = [group.pool for group in self.groups for _ in range(group.nodes)]
        reserved = all(pools)
        return Job(
            hosts=[Host(f"{self.name}-{i}.{self.name}", pool if reserved else "") for i, pool in enumerate(pools)],
            config=self.plan.config,
            config_file=self.config_file,
            changes=self.changes,
            folder=Path(self.folder),
            python=PYTHON,
            continue_file=Path(self.continue_file),
            wait=JOIN_SECONDS,
        )

    @property
    def launch(self) -> list[str]:
        """The command of every host; the hosts and the own number follow."""
        joining = ["--wait", f"{JOIN_SECONDS:g}", "--continue", self.continue_file]
        return ["megasync", "launch", str(self.config_file), *self.changes, *joining]

    @property
    def stop_seconds(self) -> int:
        return round(self.job.stop_seconds)

    @property
    def stop_command(self) -> str:
        """The command before a host is taken away that the run cannot go on without."""
        words = [PYTHON, "-m", "megasync.launch.preemption", "stop", self.continue_file, str(self.stop_seconds)]
        return shlex.join(words)


def deployment(
    target: str,
    plan: Plan,
    config_file: Path,
    changes: Sequence[str],
    image: str = "",
    volume: str = "",
    folder: str = "",
    gpu: str = "H100",
) -> Deployment:
    """Checks what a scheduler would refuse, or what would fail only once nodes are there.

    `volume` is CLAIM:PATH. Raises ConfigError, which names the value and the fix.
    """
    config = plan.config
    if target not in TARGETS:
        raise ConfigError(f"--target {target!r} is unknown; choose one of {', '.join(TARGETS)}")
    if plan.refusals:
        raise ConfigError("the run does not fit: " + "; ".join(plan.refusals) + "; see `megasync plan`")
    if config.cluster.device == "auto":
        raise ConfigError(
            "cluster.device is 'auto', which takes what a machine has, but this one does not tell what the nodes have; "
            "add cluster.device=cuda or cluster.device=cpu"
        )
    for change in changes:
        key, _, value = change.partition("=")
        if _holds_secret(key, value):
            raise ConfigError(
                f"the override {key}=... holds a secret, which would stand in the rendered file; write "
                f"{key}: ${{oc.env:NAME}} into CONFIG, and put NAME into the scheduler's secret"
            )
    if target != SLURM and (len(config.name) > LONGEST_NAME or not NAME.fullmatch(config.name)):
        fixed = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).lstrip("-0123456789")[:LONGEST_NAME].rstrip("-")
        raise ConfigError(
            f"name={config.name!r} cannot name what {target} makes: lower-case letters, digits and '-', a letter "
            f"first, at most {LONGEST_NAME} characters; add name={fixed or 'run'}"
        )
    if re.search(r"\s", image):
        raise ConfigError(f"--image {image!r} is no name of an image; give one such as registry.example/megasync:1")
    claim, mount = _volume(volume) if volume else ("", "")
    in_pods = target in (KUBERAY, KUBERNETES_JOB)
    if in_pods and not image:
        raise ConfigError(
            f"--target {target} needs --image: the name under which your nodes can pull the image that the Dockerfile "
            "builds (docs/launching.md#container-images)"
        )
    if (image or folder) and not in_pods:
        raise ConfigError(
            f"--target {target} runs in a checkout with its own environment; leave out --image and --folder, which are "
            f"for {KUBERAY} and {KUBERNETES_JOB}"
        )
    if not claim and (in_pods or (target == SKYPILOT and plan.nodes > 1)):
        raise ConfigError(
            f"--target {target} needs --volume CLAIM:PATH: a volume that all nodes can write, for the run's directory "
            "and the models, such as --volume megasync-data:/data"
        )
    if claim and not PurePosixPath(config.run_root).is_relative_to(mount):
        raise ConfigError(
            f"run_root={config.run_root} is not on the volume, which is mounted at {mount}, so the run would be lost "
            f"with its node; add run_root={mount}/runs"
        )
    folder = folder or IMAGE_FOLDER
    if not PurePosixPath(folder).is_absolute():
        raise ConfigError(f"--folder {folder!r} is relative; give the absolute path inside the container")
    if in_pods and config_file.is_absolute() and not any(map(config_file.is_relative_to, (folder, mount))):
        raise ConfigError(
            f"CONFIG {config_file} is neither in --folder {folder} nor on the volume at {mount}, so pods would not "
            "find it; copy it to one of them, and give its path there, or one relative to --folder"
        )
    return Deployment(plan, config_file, list(changes), image, claim, mount, folder, gpu)


def _holds_secret(key: str, value: str) -> bool:
    """Whether an override gives a secret as it is, by its key, by one inside its value, or by its form."""
    try:
        given = yaml.safe_load(value)
    except yaml.YAMLError:
        given = value
    return masked(given, key) != given or masked_text(value) != value


def _volume(volume: str) -> tuple[str, str]:
    claim, _, path = volume.partition(":")
    if not CLAIM.fullmatch(claim) or not re.fullmatch(r"(/[\w.-]+)+", path):
        raise ConfigError(
            f"--volume {volume!r} is not CLAIM:PATH, the name of a volume (lower-case letters, digits, '-', '.') and "
            "the absolute path to mount it at, such as megasync-data:/data"
        )
    return claim, path


def render(target: str, run: Deployment) -> str:
    """The text of the file for a scheduler, with what to do with it in its first lines."""
    return {KUBERAY: kuberay, KUBERNETES_JOB: kubernetes_job, SKYPILOT: skypilot, SLURM: slurm}[target](run)


def kuberay(run: Deployment) -> str:
    """A RayJob: KubeRay starts Ray in the pods, under a token that it makes, and submits the driver to the head.

    The head has no device. Each group of nodes is a group of workers.
    """
    check = [PYTHON, "-m", "megasync.launch.preemption", "check", run.continue_file]
    driver = (run.job.doctor("auto"), run.job.driver("auto"), check)
    ports = {"gcs-server": HEAD_PORT, "dashboard": DASHBOARD_PORT, "client": 10001}
    # The driver, and the processes that compute rewards beside it.
    cores = 2 + run.plan.config.rollout.reward_processes
    head = {
        "name": "ray-head",
        "resources": {"requests": {"cpu": str(cores), "memory": f"{2 * cores}Gi"}},
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        **_probes({"tcpSocket": {"port": DASHBOARD_PORT}}, {"tcpSocket": {"port": HEAD_PORT}}),
    }
    agent = {"tcpSocket": {"port": AGENT_PORT}}
    worker = {"name": "ray-worker", "resources": _resources(run), **_probes(agent, agent)}
    workers = [
        {
            "groupName": group.name,
            **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), group.nodes),
            "rayStartParams": _ray_parameters(run, group),
            "template": {"spec": _pod(run, worker, stops=group.pool != "rollout" and group.name != "models")},
        }
        for group in run.groups
    ]
    return _text(
        [
            f"kubectl create secret generic {run.name} --from-literal=HF_TOKEN=... (if CONFIG needs secret variables)",
            "kubectl apply -f THIS_FILE (needs KubeRay 1.5.1 or newer)",
        ],
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": run.name},
            "spec": {
                # A submitter pod would let its own shell have the entrypoint, of which only the first command would
                # reach the head.
                "submissionMode": "HTTPMode",
                "entrypoint": " && ".join(map(shlex.join, driver)),
                "backoffLimit": RETRIES,
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": {
                    "rayVersion": version("ray"),
                    "authOptions": {"mode": "token"},
                    "headGroupSpec": {
                        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
                        "template": {"spec": _pod(run, head, stops=True)},
                    },
                    "workerGroupSpecs": workers,
                },
            },
        },
    )


def kubernetes_job(run: Deployment) -> str:
    """An indexed Job, whose pods start their Ray nodes themselves, and the Service that gives them names.

    Only the first pod ends the Job. It is replaced when it was pre-empted, which does not count as a failure.
    """
    hosts = run.job.hosts
    listed = ",".join(f"{host.name}={host.pool}" if host.pool else host.name for host in hosts)
    # Kubernetes replaces $(NAME) in commands.
    command = [word.replace("$(", "$$(") for word in run.launch]
    trainers = sum(host.pool != "rollout" for host in hosts)
    container = {
        "name": "megasync",
        "command": [*command, "--hosts", listed, "--rank", "$(JOB_COMPLETION_INDEX)"],
        "resources": _resources(run),
        "readinessProbe": {"exec": {"command": ["test", "-S", RAYLET_SOCKET]}, "periodSeconds": 10},
    }
    if len(hosts) > 1:
        token = {"secretKeyRef": {"name": run.name, "key": TOKEN_VARIABLE}}
        container["env"] = [{"name": TOKEN_VARIABLE, "valueFrom": token}]
    pod = _pod(run, container, stops=True)
    if trainers < len(hosts):
        # Losing servers costs no work: they come back, and their requests continue elsewhere.
        stop = f"[ $JOB_COMPLETION_INDEX -ge {trainers} ] || {run.stop_command}"
        pod["containers"][0]["lifecycle"] = _before_stop(stop)
    labels = {"app.kubernetes.io/name": "megasync", "app.kubernetes.io/instance": run.name}
    ignored = (
        {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"onExitCodes": {"containerName": "megasync", "operator": "In", "values": [UNFINISHED]}},
    )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": run.name, "labels": labels},
        "spec": {
            "clusterIP": "None",
            # Pods find the first one before it is ready.
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "ray", "port": HEAD_PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": run.name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": len(hosts),
            "parallelism": len(hosts),
            "backoffLimit": RETRIES,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": [{"action": "Ignore", **rule} for rule in ignored]},
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"subdomain": run.name, "restartPolicy": "Never", **pod},
            },
        },
    }
    secret = f"kubectl create secret generic {run.name} --from-literal={TOKEN_VARIABLE}=$(openssl rand -hex 32)"
    steps = [f"{secret} (and other secret variables)"] if len(hosts) > 1 else []
    return _text([*steps, "kubectl apply -f THIS_FILE (needs Kubernetes 1.33 or newer)"], service, job)


def skypilot(run: Deployment) -> str:
    """A task whose nodes get the checkout and its environment, and start their parts of the run."""
    environment = "bash launch/gpu_environment.sh .venv" if run.on_gpus else "bash launch/setup.sh"
    if run.on_gpus:
        resources = {"accelerators": {run.gpu: run.devices}, "memory": run.memory.replace("Gi", "+")}
    else:
        resources = {"cpus": f"{run.devices}+", "memory": run.memory.replace("Gi", "+")}
    several = run.plan.nodes > 1
    task = {
        "name": run.name,
        "num_nodes": run.plan.nodes,
        "resources": resources,
        "workdir": ".",
        **({"volumes": {run.mount: run.claim}, "envs": {"HF_HOME": f"{run.mount}/huggingface"}} if run.claim else {}),
        **({"secrets": {TOKEN_VARIABLE: None}} if several else {}),
        "setup": environment,
        "run": "export PATH=$PWD/.venv/bin:$PATH\n"
        f"exec {shlex.join(run.launch)} "
        '--hosts "$(paste -sd, <<<"$SKYPILOT_NODE_IPS")" --rank "$SKYPILOT_NODE_RANK"\n',
    }
    secret = f" --secret {TOKEN_VARIABLE}=$(openssl rand -hex 32)" if several else ""
    return _text([f"sky jobs launch{secret} THIS_FILE, in the checkout"], task)


def slurm(run: Deployment) -> str:
    """launch/slurm.sbatch with the nodes and devices of the plan."""
    devices = f"--gpus-per-node={run.devices}" if run.on_gpus else f"--cpus-per-task={run.devices}"
    options = (f"--job-name={run.name}", f"--nodes={run.plan.nodes}", devices, *SLURM_OPTIONS)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# sbatch THIS_FILE, in the root of the checkout",
            *(f"#SBATCH {option}" for option in options),
            "set -euo pipefail",
            f"exec .venv/bin/megasync launch --slurm {shlex.join([str(run.config_file), *run.changes])}",
            "",
        ]
    )


def _text(steps: Sequence[str], *documents: dict[str, Any]) -> str:
    notes = "".join(f"# {step}\n" for step in steps)
    return notes + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes YAML as people do: what appears twice is written twice, and text of several lines as such lines."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _pod(run: Deployment, container: dict[str, Any], *, stops: bool) -> dict[str, Any]:
    """The pod of a node. With `stops`, the run saves and stops before the pod is deleted."""
    cluster = run.plan.config.cluster
    keys = {"tls.crt": cluster.tls_cert, "tls.key": cluster.tls_key, "ca.crt": cluster.tls_ca}
    files = {key: str(PurePosixPath(run.folder) / path) for key, path in keys.items() if path}
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}, {"name": "data", "mountPath": run.mount}]
    mounts += [{"name": "tls", "mountPath": path, "subPath": key, "readOnly": True} for key, path in files.items()]
    memory = {"medium": "Memory", "sizeLimit": SHARED_MEMORY[cluster.device]}
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": memory},
        {"name": "data", "persistentVolumeClaim": {"claimName": run.claim}},
    ]
    volumes += [{"name": "tls", "secret": {"secretName": f"{run.name}-tls"}}] if files else []
    variables = [
        {"name": "HF_HOME", "value": f"{run.mount}/huggingface"},
        # As `launch.node` has it: nothing is reported to Ray's authors.
        {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
        {"name": HOST_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    user = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), IMAGE_USER)
    return {
        "terminationGracePeriodSeconds": run.stop_seconds + GRACE_SECONDS,
        "securityContext": {"runAsNonRoot": True, **user},
        **({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]} if run.on_gpus else {}),
        "containers": [
            {
                **container,
                "image": run.image,
                "workingDir": run.folder,
                "env": [*variables, *container.get("env", ())],
                "envFrom": [{"secretRef": {"name": run.name, "optional": True}}],
                "volumeMounts": mounts,
                **({"lifecycle": _before_stop(run.stop_command)} if stops else {}),
            }
        ],
        "volumes": volumes,
    }


def _before_stop(command: str) -> dict[str, Any]:
    return {"preStop": {"exec": {"command": ["sh", "-c", command]}}}


def _probes(ready: dict[str, Any], alive: dict[str, Any]) -> dict[str, Any]:
    """A busy node may be slow to answer, so only one that is silent for two minutes is restarted."""
    return {
        "readinessProbe": {**ready, "periodSeconds": 10, "timeoutSeconds": 5},
        "livenessProbe": {**alive, "initialDelaySeconds": 60, "periodSeconds": 20, "timeoutSeconds": 10}
        | {"failureThreshold": 6},
    }


def _resources(run: Deployment) -> dict[str, Any]:
    """Requests, so that a node has room; only devices have a limit, which Kubernetes requires of them."""
    asked = {"requests": {"cpu": str(run.devices), "memory": run.memory}}
    return asked | ({"limits": {"nvidia.com/gpu": run.devices}} if run.on_gpus else {})


def _ray_parameters(run: Deployment, group: NodeGroup) -> dict[str, str]:
    """The options of `ray start` as KubeRay passes them, through a shell."""
    cpus = {} if run.on_gpus else {"num-cpus": str(run.devices)}
    if not group.pool:
        return cpus
    reserved = json.dumps({node_resource(group.pool): NODE_RESOURCE_AMOUNT})
    return {**cpus, "resources": json.dumps(reserved)}
