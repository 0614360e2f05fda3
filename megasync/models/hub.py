"""Models by their names on a hub: `Qwen/Qwen3-0.6B` becomes a folder in the cache of huggingface_hub.

A text is a path if something exists there, or if it begins with `/`, `./`, `../`, `~` or `models/`, where `megasync
fetch` writes (a hub has no owner of that name). Any other text of the form `owner/name` is a name; with `@revision` at
its end, that of a branch, a tag or a commit.

Invariants: a run's configuration names a commit, never a branch, so a resumed run has the files that it began with,
whatever was published since (`resolve_names` records the commit in `Config.as_written`). Only what is read is
downloaded: safetensors, and the JSON and text files beside them; no pickle and no code. Weights get their name in the
cache once their digest is the hub's; until then they are a `.incomplete` file, which the next attempt continues. They
come over HTTP, because huggingface_hub starts a file again that a process has not finished, over HTTP as over Xet.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from megasync.base.files import bytes_text
from megasync.config import Config
from megasync.config.commands import is_served, is_supervised
from megasync.config.limits import keys_of, path_problem
from megasync.config.schema import CriticConfig, DatasetConfig, FrozenModelConfig, ModelConfig
from megasync.errors import ConfigError
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology

if TYPE_CHECKING:
    from huggingface_hub import RepoFile
    from tqdm import tqdm

_NAME = re.compile(r"(?!models/)([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The files of a repository's top level that are downloaded.
_WANTED = re.compile(r"(?!consolidated)[^/]+\.(safetensors|json|jinja|txt|model|tiktoken)")
WEIGHTS = ".safetensors"
# Files that are downloaded at the same time.
WORKERS = 8


@dataclass(frozen=True)
class Snapshot:
    """One commit of a repository, and the folder in the cache that holds it, or will."""

    repo: str
    commit: str

    @property
    def name(self) -> str:
        return f"{self.repo}@{self.commit}"

    @property
    def folder(self) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
        return cache / repo_folder_name(repo_id=self.repo, repo_type="model") / "snapshots" / self.commit


def is_name(text: str) -> bool:
    """Whether a text is the name of a model on a hub, and not a path."""
    return _NAME.fullmatch(text) is not None and path_problem(text) is None and not Path(text).exists()


def snapshot_of(name: str) -> Snapshot | None:
    """The snapshot that a name with a commit means; None for any other text. Asks no hub."""
    named = _NAME.fullmatch(name)
    return Snapshot(named[1], named[2]) if named is not None and _COMMIT.fullmatch(named[2] or "") else None


def title(text: str) -> str:
    """The last part of a model's path or name, without its commit."""
    name, _, commit = Path(text).name.partition("@")
    return name if _COMMIT.fullmatch(commit) else Path(text).name


# Configurations


def resolve_names(config: Config, *, weights: bool = True) -> Config:
    """Replaces each name of a model by its folder, in place; the saved configuration names the commit. Returns it.

    Without `weights`, config.json alone is downloaded, and not for a model whose `model.config` is given. With them,
    datasets of a hub are pinned too. A policy or critic that no family covers is refused before its weights are
    downloaded. Raises ConfigError.
    """
    served = is_served(config)
    alone = served or is_supervised(config)
    for key, section, item in keys_of(config):
        if weights and not served and isinstance(section, DatasetConfig) and item.name == "source":
            _pin_rows(section)
        if item.name != "path" or not isinstance(section, ModelConfig | CriticConfig | FrozenModelConfig):
            continue
        frozen = isinstance(section, FrozenModelConfig)
        described = isinstance(section, ModelConfig) and section.config is not None and not weights
        if section.path is None or described or (frozen and alone) or not is_name(section.path):
            continue
        snapshot = _find(section.path, key)
        if not frozen:
            check_family(snapshot.folder, key, snapshot.name)
        if weights:
            download(snapshot, key)
        section.path = str(snapshot.folder)
        config.as_written[tuple(key.split("."))] = (snapshot.name, section.path)
    return config


def with_names(config: Config) -> Config:
    """A copy with the names, and their commits, in place of the folders that `resolve_names` has put there."""
    copied, names = deepcopy(config), _names(config)
    for key, section, item in keys_of(copied):
        if key in names:
            setattr(section, item.name, names[key])
    return copied


def _names(config: Config) -> dict[str, str]:
    """The names that `resolve_names` has replaced, by their keys."""
    written = {".".join(path): each for path, each in config.as_written.items() if _NAME.fullmatch(each[0])}
    held = {key: getattr(section, item.name) for key, section, item in keys_of(config) if key in written}
    return {key: written[key][0] for key, value in held.items() if value == written[key][1]}


def local_folder(text: str | Path, key: str = "MODEL", *, weights: bool = True) -> Path:
    """The folder of a model that is given by its path or by its name. Raises ConfigError."""
    if not is_name(str(text)):
        return Path(text)
    snapshot = _find(str(text), key)
    if weights:
        download(snapshot, key)
    return snapshot.folder


def missing_here(folders: Mapping[str, str]) -> str:
    """Downloads models on this node of a run, by names with commits and the driver's folders.

    Returns why a node cannot have one in that folder; "" if it has all.
    """
    try:
        for name, folder in folders.items():
            if (here := str(local_folder(name, name))) != folder:
                return f"{name} is in {here}, and in {folder} for the driver; set HF_HOME to one path on all nodes"
    except ConfigError as error:
        return str(error)
    return ""


def snapshots(config: Config) -> list[Snapshot]:
    """The snapshots of the models that `resolve_names` has found."""
    return [each for name in _names(config).values() if (each := snapshot_of(name)) is not None]


def pending(config: Config) -> dict[Path, int]:
    """The bytes that a run will download, by folder of the model, for those that are not whole. Raises ConfigError."""
    sizes: dict[Path, int] = {}
    for snapshot in snapshots(config):
        if not _is_complete(snapshot):
            with _explained(snapshot.repo, snapshot.name):
                sizes[snapshot.folder] = _open_bytes(snapshot, _missing(snapshot, _listed(snapshot)))
    return sizes


def _pin_rows(dataset: DatasetConfig) -> None:
    """Names the commit of a dataset of a hub. One whose commit the hub does not tell stays: loading it will say why."""
    named = _NAME.fullmatch(dataset.source) if dataset.kind == "hf" and is_name(dataset.source) else None
    if named is None or _COMMIT.fullmatch(named[2] or ""):
        return
    import httpx
    from huggingface_hub import HfApi, errors

    revision = named[2] or dataset.options.get("revision")
    try:
        commit = HfApi().resolve_revision(named[1], repo_type="dataset", revision=revision)
    except (errors.HfHubHTTPError, errors.RevisionResolutionError, errors.HFValidationError, httpx.HTTPError):
        return
    dataset.source = f"{named[1]}@{commit.resolved}"
    dataset.options = {name: value for name, value in dataset.options.items() if name != "revision"}


# The hub


def _find(name: str, key: str) -> Snapshot:
    """The commit that a name means now, whose config.json is in the cache then. Raises ConfigError."""
    from huggingface_hub import HfApi, hf_hub_download

    repo, _, revision = name.partition("@")
    with _explained(key, name):
        commit = HfApi().resolve_revision(repo, revision=revision or None).resolved
        hf_hub_download(repo, "config.json", revision=commit)
    return Snapshot(repo, commit)


def check_family(folder: Path, key: str, named: str) -> None:
    """Raises ConfigError, with what the user has named, for a model that no family covers."""
    try:
        Layout(read_hf_config(folder), Topology())
    except (ConfigError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        # As in `preflight.check`: a family's rules meet values that no table of types knows.
        raise ConfigError(f"{key}={named!r}: {error}") from None


def download(snapshot: Snapshot, key: str) -> None:
    """Completes a snapshot in the cache, once for all processes that share it. Raises ConfigError.

    The wait for another process that downloads it ends with that process.
    """
    if _is_complete(snapshot):
        return
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import OfflineModeIsEnabled, WeakFileLock
    from huggingface_hub.utils import tqdm as hub_tqdm

    silent: Any = partial(hub_tqdm, disable=True)
    storage = snapshot.folder.parents[1]
    lock = storage.parent / ".locks" / storage.name / "megasync.lock"
    with _explained(key, snapshot.name):
        try:
            listed = _listed(snapshot)
        except (OfflineModeIsEnabled, httpx.TransportError):
            if _is_complete(snapshot) is None and any(snapshot.folder.glob(f"*{WEIGHTS}")):
                return  # another program's download, whose list of files is not known here: its readers check it
            raise
        if not any(name.endswith(WEIGHTS) for name in listed):
            raise ConfigError(
                f"{key}={snapshot.name!r} has no *{WEIGHTS} at its top level, and other weights are not read; name a "
                f"repository that has them"
            )
        if not _missing(snapshot, listed):
            return  # also if the cache cannot be written
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if not (missing := _missing(snapshot, listed)):
                return
            total, needed = sum(file.size for file in missing), _open_bytes(snapshot, missing)
            _check_space(snapshot, key, needed)
            print(f"downloading {snapshot.name}, {bytes_text(needed)}, to {storage}", file=sys.stderr)
            with hub_tqdm(
                total=total, initial=total - needed, unit="B", unit_scale=True, desc=snapshot.repo, disable=None
            ) as bar:
                _download_weights(snapshot, missing, bar)
                snapshot_download(snapshot.repo, revision=snapshot.commit, allow_patterns=[*listed], tqdm_class=silent)
                bar.update(total - bar.n)


def _is_complete(snapshot: Snapshot) -> bool | None:
    """Whether all wanted files are in the cache; None if the cache does not know which files there are."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(snapshot.repo, revision=snapshot.commit)
    except CachedRepoTreeNotFoundError:
        return None
    return all((snapshot.folder / file.path).exists() for file in tree if _WANTED.fullmatch(file.path))


def _listed(snapshot: Snapshot) -> dict[str, RepoFile]:
    """The wanted files of a commit by their names, as the hub lists them."""
    from huggingface_hub import HfApi, RepoFile

    tree = HfApi().list_repo_tree(snapshot.repo, revision=snapshot.commit)
    return {each.path: each for each in tree if isinstance(each, RepoFile) and _WANTED.fullmatch(each.path)}


def _missing(snapshot: Snapshot, listed: dict[str, RepoFile]) -> list[RepoFile]:
    return [file for name, file in listed.items() if not (snapshot.folder / name).exists()]


def _blob(snapshot: Snapshot, file: RepoFile) -> Path | None:
    """The place of a file's content in the cache; None where its digest, or a way to continue it, is not known."""
    from huggingface_hub import constants

    if file.lfs is None or not file.path.endswith(WEIGHTS) or file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return None
    return snapshot.folder.parents[1] / "blobs" / file.lfs.sha256


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.megasync.incomplete")


def _open_bytes(snapshot: Snapshot, missing: Sequence[RepoFile]) -> int:
    """The bytes of missing files that no earlier attempt has brought."""

    def present(blob: Path | None) -> int:
        return next((path.stat().st_size for path in (blob, _part(blob)) if path.is_file()), 0) if blob else 0

    return sum(max(0, file.size - present(_blob(snapshot, file))) for file in missing)


def _check_space(snapshot: Snapshot, key: str, needed: int) -> None:
    storage = snapshot.folder.parents[1]
    place = next(each for each in (storage, *storage.parents) if each.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise ConfigError(
            f"{key}={snapshot.name!r} needs {bytes_text(needed)} in {storage}, and {bytes_text(free)} are free there; "
            f"free some space, or set HF_HOME to a folder on a larger disk"
        )


def _download_weights(snapshot: Snapshot, missing: Sequence[RepoFile], bar: tqdm[Any]) -> None:
    """Brings the weights among the missing files into the cache, each from where its last attempt ended."""
    stop = Event()

    class Share:
        """Adds to the common bar what one file brings, and ends the download at the next piece after a stop."""

        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> Share:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count: int) -> None:
            if stop.is_set():
                raise InterruptedError("the download was stopped")
            bar.update(count)

    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for done in as_completed([pool.submit(_download_blob, snapshot, file, Share) for file in missing]):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _download_blob(snapshot: Snapshot, file: RepoFile, progress: type[Any]) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    blob = _blob(snapshot, file)
    if blob is None or blob.exists():
        return
    part = _part(blob)
    part.parent.mkdir(parents=True, exist_ok=True)
    if part.is_file() and part.stat().st_size > file.size:
        part.unlink()
    url = hf_hub_url(snapshot.repo, file.path, revision=snapshot.commit)
    with part.open("ab") as out:
        size = out.tell()
        http_get(url, out, resume_size=size, headers=build_hf_headers(), expected_size=file.size, tqdm_class=progress)
    with part.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != blob.name:
        part.unlink()
        raise OSError(errno.EIO, f"{file.path} arrived with another digest than the hub's, and was removed")
    part.rename(blob)


# Refusals


@contextmanager
def _explained(key: str, name: str) -> Iterator[None]:
    """Raises ConfigError, with what is wrong and the fix, for whatever keeps a model from being had."""
    import httpx
    from huggingface_hub import errors
    from huggingface_hub.utils import OfflineModeIsEnabled

    try:
        yield
    except (errors.LocalEntryNotFoundError, errors.RevisionResolutionError) as error:
        raise ConfigError(f"{key}={name!r} {_refusal(error.__cause__ or error, name)}") from error
    except (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        httpx.HTTPError,
        OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise ConfigError(f"{key}={name!r} {_refusal(error, name)}") from error


def _refusal(error: BaseException, name: str) -> str:
    from huggingface_hub import constants, errors, get_token

    hub, (repo, _, revision) = constants.ENDPOINT, name.partition("@")
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    whose = "the token in use (HF_TOKEN, or that of `hf auth login`)" if get_token() else "a download without a token"
    here = f"there is no folder {name} in {Path.cwd()}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"is gated, and {whose} has no access; accept its terms at {hub}/{repo}, and set HF_TOKEN to a token of "
            f"that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        revision = revision or constants.DEFAULT_REVISION
        return f"has no revision {revision!r}; name a branch, a tag or a commit of {hub}/{repo}"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"has no config.json at {hub}/{repo}; name a repository with a model in the format of transformers"
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return (
            f"is neither a folder nor the name of a model: {here}, and {hub} has no repository {repo} that {whose} can "
            f"see; check the spelling, write ./{name} for a folder, or set HF_TOKEN for a private model"
        )
    if status in (401, 403):
        return f"is refused by {hub} (status {status}): {whose} is not valid for it; set HF_TOKEN to one that is"
    if status is None and isinstance(error, OSError) and not isinstance(error, ConnectionError | FileNotFoundError):
        return (
            f"could not be downloaded to {constants.HF_HUB_CACHE}: {error}; start again, which goes on where this "
            f"ended, with enough free space there or with HF_HOME on another disk"
        )
    said = str(error).strip().partition("\n")[0]
    why = (
        "HF_HUB_OFFLINE is set"
        if constants.HF_HUB_OFFLINE
        else f"a request to {hub} failed ({type(error).__name__}: {said})"
    )
    return (
        f"is not in the cache {constants.HF_HUB_CACHE}, or not whole, and {why}; {here} either. Run `megasync fetch "
        f"{name}` where {hub} can be reached, with the same HF_HOME, or give the path of a folder"
    )
