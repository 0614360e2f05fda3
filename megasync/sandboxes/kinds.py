"""The kinds of sandboxes by their names in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megasync.config.limits import path_problem
from megasync.errors import ConfigError
from megasync.sandboxes.bubblewrap import BubblewrapStarter
from megasync.sandboxes.containers import ApptainerStarter, docker, podman
from megasync.sandboxes.local import LocalStarter
from megasync.sandboxes.protocol import WORK_LIMITS, Spec, Starter
from megasync.sandboxes.remote import RemoteStarter

KINDS: dict[str, Callable[[Spec], Starter]] = {
    "process": LocalStarter,
    "bubblewrap": BubblewrapStarter,
    "docker": docker,
    "podman": podman,
    "apptainer": ApptainerStarter,
    "remote": RemoteStarter,
}


def starter_of(options: Mapping[str, Any] | Spec) -> Starter:
    """Starts sandboxes of the specified kind. Raises ConfigError for an option or kind that does not exist."""
    try:
        spec = options if isinstance(options, Spec) else Spec.of(options)
    except TypeError as error:
        raise ConfigError(str(error)) from None
    if spec.kind not in KINDS:
        raise ConfigError(f"unknown sandbox kind {spec.kind!r}; kinds: {', '.join(KINDS)}")
    # An image of a container is no path.
    image = spec.image if spec.kind == "process" else None
    for name, path in (("folder", spec.folder), ("image", image), *(("visible", path) for path in spec.visible)):
        if path is not None and (problem := path_problem(path)) is not None:
            raise ConfigError(f"{name}={path[:200]!r} of a sandbox is not a usable path: {problem}; choose another one")
    if spec.folder is not None and not Path(spec.folder).is_dir():
        raise ConfigError(f"folder={spec.folder!r} of a sandbox is not a folder of this machine")
    if image is not None and not Path(image).is_dir():
        raise ConfigError(f"image={spec.image!r} is not a root folder, as sandboxes of kind process need; see docker")
    for path in spec.visible:
        if not path.startswith("/") or not Path(path).exists():
            raise ConfigError(f"visible={path!r} of a sandbox must be an absolute path that exists on this machine")
        if image is not None and (Path(image) / path.split("/")[1]).exists():
            raise ConfigError(f"visible={path!r}: the image has a folder of that name; mount it elsewhere")
    if spec.kind == "remote" and (spec.image or spec.visible or spec.network or spec.limits != WORK_LIMITS):
        raise ConfigError(
            "image, visible, network and limits of a remote sandbox are those of its server; set them there"
        )
    return KINDS[spec.kind](spec)
