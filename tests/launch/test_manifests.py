"""`megasync launch render`: what schedulers start is the plan, in fields that they know, without secrets."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from megasync.cli.commands import app
from megasync.config import load_config
from megasync.errors import ConfigError
from megasync.launch.manifests import SLURM_OPTIONS, TARGETS, deployment
from megasync.planning.plan import Plan, resolve_plan
from megasync.starters.fetch import fetch

ROOT = Path(__file__).parents[2]
CONFIGS = ("configs/qwen3_8b_math.yaml", "configs/qwen3_32b_math.yaml")
ON_VOLUME = ("--volume", "megasync-data:/data", "run_root=/data/runs")
IN_PODS = ("--image", "registry.example/megasync:gpu", *ON_VOLUME)
OPTIONS = {"kuberay": IN_PODS, "job": IN_PODS, "skypilot": ON_VOLUME, "slurm": ()}


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return resolve_plan(load_config(ROOT / CONFIGS[1]))


def rendered(target: str, config: str, *options: str) -> str:
    result = CliRunner().invoke(app, ["launch", "render", "--target", target, config, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@cache
def documents(target: str, config: str, *options: str) -> list[dict]:
    return list(yaml.safe_load_all(rendered(target, config, *(options or OPTIONS[target]))))


def ray_cluster(config: str, *options: str) -> dict:
    (job,) = documents("kuberay", config, *options)
    return job["spec"]["rayClusterSpec"]


def container(group: dict) -> dict:
    (found,) = group["template"]["spec"]["containers"]
    return found


def gpus(found: dict) -> int:
    return found["resources"]["limits"]["nvidia.com/gpu"]


@pytest.mark.parametrize("config", CONFIGS)
def test_nodes_and_devices_of_every_target_are_those_of_the_plan(config: str) -> None:
    plan = resolve_plan(load_config(config))
    pools = {"trainer": len(plan.trainer.nodes), "rollout": len(plan.rollout.nodes)} if plan.nodes > 1 else {"node": 1}

    workers = ray_cluster(config)["workerGroupSpecs"]
    assert {group["groupName"]: group["replicas"] for group in workers} == pools
    assert {(group["minReplicas"], group["maxReplicas"]) for group in workers} == {(n, n) for n in pools.values()}
    assert {gpus(container(group)) for group in workers} == {8}

    _, job = documents("job", config)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == plan.nodes
    assert gpus(container(job["spec"])) == 8

    (task,) = documents("skypilot", config)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (plan.nodes, {"H100": 8})

    script = rendered("slurm", config)
    assert f"#SBATCH --nodes={plan.nodes}\n#SBATCH --gpus-per-node=8\n" in script


def test_a_run_on_cpus_asks_for_cores_that_its_ray_nodes_offer(tmp_path: Path) -> None:
    made = f"model.path={fetch('digits', tmp_path / 'digits')}"
    (group,) = ray_cluster("configs/quickstart.yaml", *IN_PODS, made)["workerGroupSpecs"]
    assert group["rayStartParams"]["num-cpus"] == container(group)["resources"]["requests"]["cpu"] == "4"
    assert "limits" not in container(group)["resources"]


def test_worker_groups_are_reserved_for_their_pools_through_a_shell() -> None:
    for group in ray_cluster(CONFIGS[1])["workerGroupSpecs"]:
        (word,) = shlex.split(group["rayStartParams"]["resources"])
        assert json.loads(word) == {f"megasync_{group['groupName']}": 10_000}


def test_a_pod_that_the_run_needs_has_it_saved_before_it_goes_and_has_the_time_for_that() -> None:
    seconds = 1800 + 600 + 60  # train_step, weight_sync and shutdown of the configuration
    cluster = ray_cluster(CONFIGS[1])
    trainer, rollout = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], trainer):
        (_, _, command) = container(group)["lifecycle"]["preStop"]["exec"]["command"]
        assert shlex.split(command)[1:] == [
            *("-m", "megasync.launch.preemption", "stop", "/data/runs/qwen3-32b-math.run", str(seconds))
        ]
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > seconds
    assert "lifecycle" not in container(rollout)

    _, job = documents("job", CONFIGS[1])
    (*_, command) = container(job["spec"])["lifecycle"]["preStop"]["exec"]["command"]
    for index, asks in ((0, True), (1, True), (2, False), (3, False)):
        shown = subprocess.run(
            ["sh", "-c", command.replace("python", "echo")],
            env={"PATH": "/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("preemption stop" in shown.stdout) == asks


def test_a_preempted_run_is_continued_and_counts_as_no_failure() -> None:
    _, job = documents("job", CONFIGS[1])
    disrupted, unfinished = job["spec"]["podFailurePolicy"]["rules"]
    assert disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert unfinished["onExitCodes"]["values"] == [75]
    (ray_job,) = documents("kuberay", CONFIGS[1])
    assert ray_job["spec"]["entrypoint"].endswith("megasync.launch.preemption check /data/runs/qwen3-32b-math.run")


def test_the_head_gets_all_commands_of_a_ray_job() -> None:
    """KubeRay hands the entrypoint over as it is; in its other modes a shell of the submitter would divide it."""
    (ray_job,) = documents("kuberay", CONFIGS[1])
    spec = ray_job["spec"]
    assert spec["submissionMode"] == "HTTPMode"
    doctor, driver, check = (shlex.split(command) for command in spec["entrypoint"].split(" && "))
    assert doctor[1:4] == ["-m", "megasync", "doctor"] and driver[1:4] == ["-m", "megasync", "train"]
    assert check[1:4] == ["-m", "megasync.launch.preemption", "check"]


def test_every_pod_of_a_job_starts_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    _, job = documents("job", CONFIGS[1])
    program, *command = container(job["spec"])["command"]
    assert program == "megasync"
    head, *others = [
        CliRunner().invoke(
            app,
            [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in command] + ["--dry-run"],
            catch_exceptions=False,
        )
        for index in range(4)
    ]
    _, node, doctor, driver = map(shlex.split, head.stdout.splitlines())
    # The head does not wait for the names of others, which may not be scheduled yet.
    assert node[node.index("--peer") + 1] == ""
    assert "--head" not in node and node[node.index("--port") + 1] == "6379" and node[-4:-2] == ["--pool", "trainer"]
    assert doctor[doctor.index("--nodes") + 1] == "4"
    assert driver[driver.index("--continue") + 1] == "/data/runs/qwen3-32b-math.run"
    for other, pool in zip(others, ("trainer", "rollout", "rollout"), strict=True):
        _, line = other.stdout.splitlines()
        words = shlex.split(line)
        assert words[words.index("--head") + 1] == "qwen3-32b-math-0.qwen3-32b-math:6379"
        assert words[words.index("--pool") + 1] == pool


def test_every_node_of_a_task_starts_its_own_part() -> None:
    (task,) = documents("skypilot", CONFIGS[1])
    environment = {"PATH": "/usr/bin:/bin", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"}
    script = task["run"].replace("exec megasync", "exec echo")
    shown = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip().endswith("--hosts 10.0.0.1,10.0.0.2 --rank 1")


def test_the_slurm_script_is_the_one_in_launch_with_the_nodes_of_the_plan() -> None:
    ours = re.findall(r"^#SBATCH (.*)", (ROOT / "launch" / "slurm.sbatch").read_text(), re.MULTILINE)
    assert [option for option in ours if not re.match(r"--(job-name|nodes)=", option)] == list(SLURM_OPTIONS)
    assert rendered("slurm", CONFIGS[0], "seed=3").endswith(
        "megasync launch --slurm configs/qwen3_8b_math.yaml seed=3\n"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_no_secret_of_this_environment_is_in_a_file(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "MEGASYNC_GENERATION_KEY"):
        monkeypatch.setenv(variable, "not-for-other-eyes")
    assert "not-for-other-eyes" not in rendered(target, CONFIGS[1], *OPTIONS[target])


def test_tokens_and_keys_come_from_secrets() -> None:
    _, job = documents("job", CONFIGS[1])
    variables = {entry["name"]: entry for entry in container(job["spec"])["env"]}
    assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "qwen3-32b-math",
        "key": "RAY_AUTH_TOKEN",
    }
    assert ray_cluster(CONFIGS[1])["authOptions"] == {"mode": "token"}
    tls = ("cluster.tls_cert=/keys/cert.pem", "cluster.tls_key=/keys/key.pem")
    pod = ray_cluster(CONFIGS[1], *IN_PODS, *tls)["headGroupSpec"]["template"]["spec"]
    assert pod["volumes"][-1] == {"name": "tls", "secret": {"secretName": "qwen3-32b-math-tls"}}
    mounted = {mount["mountPath"]: mount.get("subPath") for mount in pod["containers"][0]["volumeMounts"]}
    assert (mounted["/keys/cert.pem"], mounted["/keys/key.pem"]) == ("tls.crt", "tls.key")


VOLUME = {"volume": "megasync-data:/data"}
PODS = {"image": "x", **VOLUME}
ROOT_ON_VOLUME = "run_root=/data/runs"


@pytest.mark.parametrize(
    ("target", "options", "changes", "words"),
    [
        ("nomad", {}, "", "--target 'nomad' is unknown; choose one of kuberay, job, skypilot, slurm"),
        ("job", VOLUME, ROOT_ON_VOLUME, "--target job needs --image"),
        ("kuberay", {"image": "x"}, "", "--target kuberay needs --volume CLAIM:PATH"),
        ("skypilot", {}, "", "--target skypilot needs --volume"),
        ("kuberay", PODS | {"image": "two words"}, ROOT_ON_VOLUME, "--image 'two words' is no name of an image"),
        ("kuberay", PODS | {"volume": "data"}, ROOT_ON_VOLUME, "--volume 'data' is not CLAIM:PATH"),
        ("kuberay", PODS | {"volume": "Data:/data"}, ROOT_ON_VOLUME, "lower-case letters"),
        ("kuberay", PODS | {"volume": "data:/"}, ROOT_ON_VOLUME, "--volume 'data:/' is not CLAIM:PATH"),
        ("job", PODS, "", "run_root=runs is not on the volume.*add run_root=/data/runs"),
        ("job", PODS, f"{ROOT_ON_VOLUME} name=My_Run.1", "name='My_Run.1' cannot name what job.*add name=my-run-1"),
        ("job", PODS, f"{ROOT_ON_VOLUME} name=8b", "a letter first.*add name=b"),
        ("skypilot", VOLUME, f"{ROOT_ON_VOLUME} name={'a' * 48}", "at most 47 characters"),
        ("job", PODS | {"folder": "here"}, ROOT_ON_VOLUME, "--folder 'here' is relative"),
        ("slurm", {"image": "x"}, "", "leave out --image and --folder"),
        ("slurm", {}, "cluster.device=auto", "cluster.device is 'auto'.*add cluster.device=cuda"),
        ("slurm", {}, 'rollout.server_args={"api_key":"not-for-other-eyes"}', "holds a secret.*oc.env"),
    ],
)
def test_what_a_scheduler_would_refuse_is_refused_with_the_fix(
    target: str, options: dict[str, str], changes: str, words: str, plan: Plan
) -> None:
    made = [] if "server_args" in changes else changes.split()
    with pytest.raises(ConfigError) as refused:
        deployment(
            target, replace(plan, config=load_config(CONFIGS[1], made)), Path(CONFIGS[1]), changes.split(), **options
        )
    assert re.search(words, str(refused.value)) and "not-for-other-eyes" not in str(refused.value)


def test_a_configuration_that_no_pod_can_have_is_refused(plan: Plan, tmp_path: Path) -> None:
    on_volume = replace(plan, config=load_config(CONFIGS[1], [ROOT_ON_VOLUME]))
    with pytest.raises(ConfigError, match="is neither in --folder /opt/megasync nor on the volume at /data"):
        deployment("job", on_volume, tmp_path / "mine.yaml", [], **PODS)
    assert deployment("job", on_volume, Path("/data/mine.yaml"), [], **PODS).launch[2] == "/data/mine.yaml"


def test_what_the_plan_refuses_is_refused(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="the run does not fit: too large; see `megasync plan`"):
        deployment("slurm", replace(plan, refusals=("too large",)), Path(CONFIGS[1]), [])
    with pytest.raises(ConfigError, match="not whole nodes"):
        rendered(
            "slurm", CONFIGS[1], "trainer.tensor_parallel=4", "trainer.pipeline_parallel=1", "trainer.data_parallel=3"
        )


def closed(required: str, **fields: dict) -> dict:
    """An object that has these fields and no others."""
    return {"type": "object", "required": required.split(), "properties": fields, "additionalProperties": False}


TEXT, NUMBER, TRUTH, TEMPLATE = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "object"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
# Of KubeRay's types (ray.io/v1, since version 1.5.1), the fields that are used; templates of pods are Kubernetes' own.
GROUP = {"rayStartParams": TEXTS, "template": closed("spec", spec=TEMPLATE)}
SIZES = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), NUMBER)
RAY_CLUSTER = closed(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=closed("mode", mode={"enum": ["disabled", "token"]}),
    headGroupSpec=closed("rayStartParams template", **GROUP),
    workerGroupSpecs={
        "type": "array",
        "items": closed("groupName minReplicas maxReplicas rayStartParams template", groupName=TEXT, **SIZES, **GROUP),
    },
)
RAY_JOB = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed("name", name=TEXT),
    spec=closed(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        backoffLimit=NUMBER,
        shutdownAfterJobFinishes=TRUTH,
        rayClusterSpec=RAY_CLUSTER,
    ),
)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_ray_job_has_the_fields_of_kuberay(config: str) -> None:
    (job,) = documents("kuberay", config)
    jsonschema.validate(job, RAY_JOB)


@pytest.mark.extra
@pytest.mark.parametrize("config", CONFIGS)
def test_kubernetes_knows_every_field(config: str) -> None:
    """By the schemas of `kubernetes-validate`, in which an unknown field is an error."""
    import kubernetes_validate

    cluster = ray_cluster(config)
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": group["template"]["spec"]}
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    for document in (*pods, *documents("job", config)):
        kubernetes_validate.validate(document, "1.33", strict=True)
    pods[0]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pods[0], "1.33", strict=True)


@pytest.fixture
def sky_schemas(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """SkyPilot's own schemas, without its dependencies on clouds."""
    (folder,) = importlib.util.find_spec("sky").submodule_search_locations
    package = ModuleType("sky")
    package.__path__, package.__version__ = [folder], "0"
    monkeypatch.setitem(sys.modules, "sky", package)
    monkeypatch.setitem(sys.modules, "sky.skylet.autostop_lib", mock.MagicMock())
    schemas = importlib.import_module("sky.utils.schemas")
    # Of the key `config`, which is not used.
    monkeypatch.setattr(schemas, "_task_config_schema", dict)
    return schemas


@pytest.mark.extra
@pytest.mark.parametrize("config", CONFIGS)
def test_skypilot_knows_every_field(config: str, sky_schemas: ModuleType) -> None:
    (task,) = documents("skypilot", config)
    jsonschema.validate(task, sky_schemas.get_task_schema())
    jsonschema.validate(task["resources"], sky_schemas.get_resources_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**task, "nodes": 1}, sky_schemas.get_task_schema())
