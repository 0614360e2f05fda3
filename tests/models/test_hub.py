"""Models by name: the real huggingface_hub client against a hub on loopback (`tests/support/local_hub.py`)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants, utils
from local_hub import CHUNK, LocalHub, environment, model_files, use
from waits import PATIENCE

from megasync.cli import commands as cli
from megasync.config import load_config, save_config
from megasync.config.changes import check_changes
from megasync.errors import ConfigError
from megasync.layout.families import family_of
from megasync.models.hub import is_name, local_folder, missing_here, pending, resolve_names, title, with_names
from megasync.starters.fetch import fetch

NAME = "tiny/digits"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return model_files(fetch("digits", tmp_path_factory.mktemp("models") / "digits"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = LocalHub()
    use(hub, tmp_path / "home", monkeypatch)
    yield hub
    hub.close()


def quickstart(*overrides):
    return load_config(ROOT / "configs" / "quickstart.yaml", list(overrides))


# What a name is


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("Qwen/Qwen3-0.6B@main", True),
        ("Qwen/Qwen3-0.6B@refs/pr/3", True),
        *((path, False) for path in ("/data/model", "./a/b", "../a/b", "~/a/b", "models/Qwen3-8B", "a", "a/b/c", "")),
    ],
)
def test_a_name_is_told_from_a_path_by_its_form(text, name):
    assert is_name(text) is name


def test_a_folder_that_exists_wins(hub, files, tmp_path):
    hub.push(NAME, files)
    (tmp_path / NAME).mkdir(parents=True)
    assert local_folder(NAME) == Path(NAME)
    assert not hub.requests


# Downloads


def test_only_what_is_read_is_downloaded_and_only_once(hub, files):
    others = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "consolidated.safetensors": b"twice", "a.md": b""}
    hub.push(NAME, files | others)
    folder = local_folder(NAME)
    assert model_files(folder) == files
    assert hub.sent["model.safetensors"] == len(files["model.safetensors"])
    before = len(hub.requests)
    assert local_folder(NAME) == folder
    assert hub.requests[before:] == [("GET", f"/api/models/{NAME}", "")], "only the newest commit is looked up"


def test_without_weights_config_json_alone_is_downloaded(hub, files):
    hub.push(NAME, files)
    assert [*model_files(local_folder(NAME, weights=False))] == ["config.json"]


@pytest.mark.parametrize("revision", ["main", "first"])
def test_a_name_with_a_revision_means_that_commit(hub, files, revision):
    first = hub.push(NAME, files)
    newest = hub.push(NAME, files | {"config.json": files["config.json"] + b"\n"})
    wanted = {"main": newest, "first": first}[revision]
    assert local_folder(f"{NAME}@{wanted if revision == 'first' else revision}", weights=False).name == wanted


def test_a_cut_connection_goes_on_where_it_was_cut(hub, files, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.push(NAME, files)
    hub.cut_after = 100 * CHUNK
    folder = local_folder(NAME)
    assert model_files(folder) == files
    assert len(hub.downloads()) == 2
    assert hub.sent["model.safetensors"] == len(files["model.safetensors"])


def test_the_next_attempt_goes_on_where_a_failed_one_ended(hub, files, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.push(NAME, files)
    hub.cut_after, hub.status_after_cut = 100 * CHUNK, 500
    with pytest.raises(ConfigError, match="a request to http.* failed"):
        local_folder(NAME)
    (part,) = tmp_path.rglob("*.incomplete")
    assert part.stat().st_size == 100 * CHUNK
    hub.status_after_cut = None
    assert model_files(local_folder(NAME)) == files
    assert hub.sent["model.safetensors"] == len(files["model.safetensors"])
    assert not [*tmp_path.rglob("*.incomplete")]


def test_a_damaged_part_is_found_by_its_digest_and_removed(hub, files, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.push(NAME, files)
    hub.cut_after, hub.status_after_cut = 100 * CHUNK, 500
    with pytest.raises(ConfigError):
        local_folder(NAME)
    hub.status_after_cut = None
    (part,) = tmp_path.rglob("*.incomplete")
    part.write_bytes(bytes(part.stat().st_size))
    with pytest.raises(ConfigError, match="another digest.*start again"):
        local_folder(NAME)
    assert model_files(local_folder(NAME)) == files


def test_two_at_once_make_one_download(hub, files, monkeypatch):
    at_the_lock, lock = threading.Semaphore(0), utils.WeakFileLock
    monkeypatch.setattr(utils, "WeakFileLock", lambda path: (at_the_lock.release(), lock(path))[1])
    hub.push(NAME, files)
    hub.sending.clear()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(local_folder, NAME)
        assert at_the_lock.acquire(timeout=PATIENCE) and hub.halves.acquire(timeout=PATIENCE)
        second = pool.submit(local_folder, NAME)
        reached = at_the_lock.acquire(timeout=PATIENCE)
        hub.sending.set()
        assert reached
        assert first.result(PATIENCE) == second.result(PATIENCE)
    assert len(hub.downloads()) == 1


@pytest.mark.matrix
@pytest.mark.processes
def test_ctrl_c_keeps_what_has_come_and_two_processes_make_one_download(hub, files, tmp_path):
    """Of 25 MB 15 have come; huggingface_hub writes them by 10."""
    big = {**files, "model.safetensors": os.urandom(25 * 2**20)}
    hub.push(NAME, big)
    hub.sending.clear()
    home = tmp_path / "other home"
    command = [sys.executable, "-m", "megasync", "fetch", NAME]
    env = os.environ | environment(hub, home)

    def start():
        return subprocess.Popen(
            command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    interrupted = start()
    assert hub.halves.acquire(timeout=PATIENCE)
    while not any(path.stat().st_size for path in home.rglob("*.incomplete")):
        assert interrupted.poll() is None
    interrupted.send_signal(signal.SIGINT)
    hub.sending.set()
    _, said = interrupted.communicate(timeout=PATIENCE)
    assert interrupted.returncode == 130, said
    (part,) = home.rglob("*.incomplete")
    kept, before = part.stat().st_size, hub.sent["model.safetensors"]
    assert kept >= 10 * 2**20
    both = [start(), start()]
    told = [process.communicate(timeout=PATIENCE) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert hub.sent["model.safetensors"] - before == len(big["model.safetensors"]) - kept
    (folder,) = home.glob("hub/models--*/snapshots/*")
    assert model_files(folder) == big


# Refusals


def gated(hub, monkeypatch):
    hub.gated[NAME] = "hf_mine"


def gated_for_this_account(hub, monkeypatch):
    gated(hub, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "hf_other")


def wrong_token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")


def offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def down(hub, monkeypatch):
    hub.close()


def full_disk(hub, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))


@pytest.mark.parametrize(
    ("plant", "name", "refusal"),
    [
        (
            None,
            "tiny/nothing",
            r"neither a folder nor the name.*no folder tiny/nothing in .*no repository tiny/nothing",
        ),
        (None, "tiny/ends-with-", r"neither a folder nor the name.*check the spelling"),
        (None, f"{NAME}@v9", "has no revision 'v9'; name a branch, a tag or a commit of http"),
        (None, "tiny/gguf", "has no config.json at http.*format of transformers"),
        (None, "tiny/pickles", r"has no \*.safetensors at its top level"),
        (gated, NAME, "is gated, and a download without a token has no access; accept its terms at .*set HF_TOKEN"),
        (gated_for_this_account, NAME, "is gated, and the token in use .* has no access"),
        (wrong_token, NAME, r"is refused by http.* \(status 401\): the token in use.*set HF_TOKEN"),
        (
            offline,
            NAME,
            r"not in the cache .*HF_HUB_OFFLINE is set; .* no folder tiny/digits in .*megasync fetch",
        ),
        (down, NAME, "not in the cache .*a request to http.* failed .ConnectError"),
        (full_disk, NAME, r"needs 402.\d kB in .*hub.*, and 1.0 kB are free there; .*HF_HOME"),
    ],
)
def test_what_keeps_a_model_from_being_had_is_named_with_the_fix(hub, files, monkeypatch, plant, name, refusal):
    hub.push(NAME, files)
    hub.push("tiny/gguf", {"model.gguf": b""})
    hub.push("tiny/pickles", {name: content for name, content in files.items() if name != "model.safetensors"})
    if plant is not None:
        plant(hub, monkeypatch)
    with pytest.raises(ConfigError, match=f"(?s)^model.path='{name}.*{refusal}") as error:
        resolve_names(quickstart(f"model.path={name}"))
    assert "hf_" not in str(error.value).replace("hf_home", "")
    assert not hub.downloads()


def test_a_token_reaches_the_hub_and_no_other_host(hub, files, monkeypatch):
    hub.gated[NAME] = "hf_mine"
    hub.push(NAME, files)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert model_files(local_folder(NAME)) == files
    tokens = {path.startswith("/lfs/"): token for _, path, token in hub.requests}
    assert tokens == {False: "hf_mine", True: ""}


def test_what_is_in_the_cache_needs_no_hub(hub, files, monkeypatch):
    hub.push(NAME, files)
    folder = local_folder(NAME)
    offline(hub, monkeypatch)
    assert local_folder(NAME) == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="or not whole, and HF_HUB_OFFLINE is set"):
        local_folder(NAME)


def test_a_cache_that_another_program_has_filled_is_taken_as_it_is(hub, files, monkeypatch, tmp_path):
    """The client then has no list of the files."""
    hub.push(NAME, files)
    folder = local_folder(NAME)
    shutil.rmtree(folder.parents[1] / "trees")
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    assert local_folder(NAME) == folder
    offline(hub, monkeypatch)
    assert local_folder(NAME) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="or not whole, and HF_HUB_OFFLINE is set"):
        local_folder(NAME)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"model_type": "granite", "logits_scaling": 8.0, "residual_multiplier": 0.2},
            r"'granite' in config.json is not supported.*nearest is qwen3, which has no logits_scaling, residual_mult",
        ),
        ({"model_type": "qwen4"}, "'qwen4' .*nearest is qwen3, which has the same options"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
    ],
)
def test_a_model_that_no_family_covers_is_refused_before_its_weights_come(hub, files, changes, refusal):
    hub.push(NAME, files | {"config.json": json.dumps(json.loads(files["config.json"]) | changes).encode()})
    with pytest.raises(ConfigError, match=f"model.path='{NAME}@.*{refusal}"):
        resolve_names(quickstart(f"model.path={NAME}"))
    assert not hub.downloads()


def test_a_model_without_known_options_has_no_nearest_family():
    with pytest.raises(ConfigError, match=r"'x' in config.json is not supported; supported are llama.*qwen3_5_moe$"):
        family_of({"model_type": "x"})


# Configurations


def test_every_model_of_a_configuration_may_be_a_name(hub, files, tmp_path):
    commit = hub.push(NAME, files)
    config = quickstart(
        f"model.path={NAME}",
        f"critic.path={NAME}@main",
        f"reward_models.judge={{kind: classifier, path: {NAME}}}",
        f"auxiliary_models.refiner.path={NAME}",
        f"teachers.large.path={NAME}",
    )
    folder = str(local_folder(NAME))
    assert resolve_names(config) is config
    models = (config.model, config.critic, *(each["judge"] for each in [config.reward_models]))
    assert {model.path for model in (*models, config.auxiliary_models["refiner"], config.teachers["large"])} == {folder}
    save_config(config, tmp_path / "config.yaml")
    saved = load_config(tmp_path / "config.yaml")
    assert saved.model.path == saved.critic.path == saved.teachers["large"].path == f"{NAME}@{commit}"
    assert title(saved.model.path) == "digits"
    assert with_names(config).model.path == f"{NAME}@{commit}"
    assert config.model.path == folder


def test_a_resumed_run_keeps_its_commit_and_names_another_one(hub, files, tmp_path):
    commit = hub.push(NAME, files)
    save_config(resolve_names(quickstart(f"model.path={NAME}")), tmp_path / "config.yaml")
    newer = hub.push(NAME, files | {"generation_config.json": b"{}"})
    before, resumed = load_config(tmp_path / "config.yaml"), resolve_names(load_config(tmp_path / "config.yaml"))
    assert Path(resumed.model.path).name == commit
    check_changes(before, with_names(resumed), 0)
    changed = resolve_names(load_config(tmp_path / "config.yaml", [f"model.path={NAME}"]))
    with pytest.raises(ConfigError, match=f"model.path=.?{NAME}@{newer}.? cannot replace .?{NAME}@{commit}"):
        check_changes(before, with_names(changed), 0)


def test_a_plan_with_its_own_config_json_asks_no_hub(hub, files, tmp_path):
    (tmp_path / "config.json").write_bytes(files["config.json"])
    config = quickstart(f"model.path={NAME}", f"model.config={tmp_path / 'config.json'}")
    assert resolve_names(config, weights=False).model.path == NAME
    assert not hub.requests


def test_what_a_run_will_download_is_known_before(hub, files):
    hub.push(NAME, files)
    config = resolve_names(quickstart(f"model.path={NAME}"), weights=False)
    (size,) = pending(config).values()
    assert size == sum(map(len, files.values())) - len(files["config.json"])
    assert pending(resolve_names(quickstart(f"model.path={NAME}"))) == {}


def test_another_node_gets_the_same_commit(hub, files, monkeypatch, tmp_path):
    commit = hub.push(NAME, files)
    hub.push(NAME, {})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "of another node"))
    folder = tmp_path / "of another node" / "models--tiny--digits" / "snapshots" / commit
    assert missing_here({f"{NAME}@{commit}": str(folder)}) == ""
    assert model_files(folder) == files
    assert "set HF_HOME to one path on all nodes" in missing_here({f"{NAME}@{commit}": "/elsewhere"})
    assert "no repository tiny/other" in missing_here({"tiny/other": ""})


def test_a_dataset_is_pinned_and_one_that_the_hub_does_not_know_stays(hub):
    commit = hub.push("tiny/rows", {})
    named = {"data.train.kind": "hf", "data.eval": "null"}
    for source, options, pinned in (
        ("tiny/rows", "{}", f"tiny/rows@{commit}"),
        ("tiny/rows", "{revision: main}", f"tiny/rows@{commit}"),
        ("tiny/unknown", "{}", "tiny/unknown"),
        ("parquet", "{}", "parquet"),
    ):
        keys = named | {"data.train.source": source, "data.train.options": options}
        config = resolve_names(quickstart(*(f"{key}={value}" for key, value in keys.items())))
        assert config.data.train.source == pinned
        assert "revision" not in config.data.train.options


# Commands


@pytest.fixture
def call(hub, files, monkeypatch, capsys):
    """`megasync` in this process, in the checkout, with the hub: (status, stdout, stderr)."""
    monkeypatch.chdir(ROOT)
    hub.push(NAME, files)

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["megasync", *map(str, arguments)])
        monkeypatch.setattr(cli, "end_process", lambda *_: None)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return called


def test_a_plan_names_the_commit_and_downloads_no_weights(call, hub):
    models = f"model.path={NAME}", f"auxiliary_models.refiner.path={NAME}"
    status, out, err = call("plan", "configs/quickstart.yaml", *models)
    assert status == 0, err
    assert f"{NAME}@{hub.commit(NAME, 'main')}" in out
    assert not hub.downloads()


def test_the_doctor_says_what_will_be_downloaded_and_later_checks_the_folder(call, hub):
    # Other checks of this machine may fail.
    _, out, _ = call("doctor", "configs/quickstart.yaml", f"model.path={NAME}", "cluster.device=cpu")
    assert "will be downloaded" in " ".join(out.replace("│", " ").split())
    assert not hub.downloads()
    assert call("fetch", NAME)[0] == 0
    _, out, _ = call("doctor", "configs/quickstart.yaml", f"model.path={NAME}", "cluster.device=cpu")
    assert "with its weights and a tokenizer" in " ".join(out.replace("│", " ").split())


def test_fetch_prints_the_folder_and_takes_no_other(call, hub, tmp_path):
    status, out, _ = call("fetch", NAME)
    assert (status, out.split()[-1]) == (0, str(local_folder(NAME)))
    status, _, err = call("fetch", NAME, "--out", tmp_path / "out")
    assert status == 2 and "HF_HOME" in err


def test_a_converting_command_takes_a_name(call, files, tmp_path):
    status, _, err = call("quantize", NAME, tmp_path / "fp8", "--block", 16)
    assert status == 0, err
    assert (tmp_path / "fp8" / "tokenizer.json").read_bytes() == files["tokenizer.json"]


@pytest.mark.extra
def test_rows_of_a_pinned_dataset_are_those_of_its_commit(hub, tmp_path):
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(3)]
    text = "\n".join(map(json.dumps, rows)).encode()
    commit = hub.push("tiny/rows", {"train.jsonl": text})
    hub.push("tiny/rows", {"train.jsonl": b'{"prompt": "newer", "answer": "1"}'})
    program = (
        "from megasync.config.schema import DatasetConfig; from megasync.data.datasets import load_dataset; "
        f"print([*map(dict, load_dataset(DatasetConfig(kind='hf', source='tiny/rows@{commit}'))[0])])"
    )
    env = os.environ | environment(hub, tmp_path / "home")
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(rows), done.stderr
