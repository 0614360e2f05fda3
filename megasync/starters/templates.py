"""The templates of `megasync init`, and the files of one for a model and a machine.

A template is a list of folders in `parts`, and so is what all have in common. A part's YAML files of the names in
`_LAYERS` are layers of run.yaml: `run` always applies, the others for a kind of model or machine. Later layers and
later parts win. A JSON file named as a small model has messages that come before the question in each row, for a model
that would not know what to do. All other files are copied; those in YAML are configurations as well. The comments at
the beginning of the last part's run.yaml, and of the common one, are that of the file that is written.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from megasync.errors import ConfigError
from megasync.starters.commented import commented
from megasync.starters.model import Model

PARTS = Path(__file__).parent / "parts"
CONFIG = "run.yaml"
_COMMON = "common"
_LAYERS = ("run", "chat", "cpu", "one_gpu", "gpus", "digits", "smollm2")
# Other words for a template.
_ALSO = {"mathematics": "math", "calculator": "tools", "openai": "agent", "adapters": "lora", "teacher": "distill"}


@dataclass(frozen=True, slots=True)
class Template:
    """``model`` is the one that it trains if no other is named, ``chats`` whether it needs one with a chat template.

    ``takes`` is the key that the export of its supervised run is for.
    """

    summary: str
    parts: tuple[str, ...]
    model: str = "digits"
    chats: bool = False
    takes: str = ""


TEMPLATES = {
    "reward": Template("a reward function of your own", ("reward",)),
    "math": Template("mathematics: word problems and their final answers", ("math",), "smollm2", chats=True),
    "tools": Template("an agent that calls your tools, over several turns", ("tools",), "smollm2", chats=True),
    "agent": Template("an agent that exists and uses OpenAI's API", ("agent",), "smollm2", chats=True),
    "sft": Template("supervised learning, then reinforcement learning", ("reward", "sft"), takes="model.path"),
    "lora": Template("low-rank adapters instead of all weights", ("reward", "lora")),
    "distill": Template("distillation from a teacher", ("reward", "sft", "distill"), takes="teachers.teacher.path"),
    "deepresearch": Template("an agent that searches pages for answers", ("deepresearch",), "smollm2", chats=True),
}
DEFAULT = "reward"


def find_template(name: str) -> str:
    """The name of a template. Raises ConfigError, which names the nearest."""
    if name in TEMPLATES:
        return name
    near = get_close_matches(name.lower(), [*TEMPLATES, *_ALSO], 1, 0.5)
    hint = f"did you mean {_ALSO.get(near[0], near[0])!r}? " if near else ""
    raise ConfigError(f"there is no template {name!r}; {hint}The templates are {', '.join(TEMPLATES)}")


def check_model(template: str, model: Model) -> None:
    """Raises ConfigError for a model that a template cannot train."""
    if TEMPLATES[template].chats and not model.chats:
        raise ConfigError(
            f"the template {template} needs a model with a chat template, and {model.named} has none; name another, "
            f"such as smollm2, or choose the template reward"
        )


def run_name(folder: Path) -> str:
    """The name of the runs of a folder: its own, without what names of runs cannot hold."""
    return re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-.") or "run"


def run_files(template: str, model: Model, gpus: int, name: str) -> dict[str, bytes]:
    """The files of a run by their paths, for a machine with so many GPUs. Raises ConfigError."""
    check_model(template, model)
    parts = [PARTS / part for part in (_COMMON, *TEMPLATES[template].parts)]
    kinds = ["run", "cpu" if not gpus else "one_gpu" if gpus == 1 else "gpus"]
    kinds += ["chat"] * model.chats + [model.named] * (model.small)
    layers = [
        _values(path)
        for part in parts
        for kind in _LAYERS
        if kind in kinds and (path := part / f"{kind}.yaml").exists()
    ]
    layers.append({"name": name, "model": {"path": model.path}})
    if "teachers" in (above := reduce(_merged, layers, {})):
        layers.append({"teachers": {each: {"path": model.path} for each in above["teachers"]}})
    if gpus > 1:
        layers.append(
            {
                "rollout": {"servers": gpus // 2},
                "trainer": {"data_parallel": gpus - gpus // 2},
                "cluster": {"devices_per_node": gpus},
            }
        )
    head = "\n\n".join(_head((part / CONFIG).read_text(encoding="utf-8"), name) for part in (parts[-1], parts[0]))
    files = {CONFIG: commented(reduce(_merged, layers, {}), head).encode()}
    for part in parts:
        shown = part / f"{model.named}.json"
        for path in sorted(part.rglob("*")):
            inner = path.relative_to(part)
            # Layers are no files of a run.
            if path.is_dir() or "__pycache__" in inner.parts or str(inner).partition(".")[0] in _LAYERS:
                continue
            files[str(inner)] = _configuration(path, name) if path.suffix == ".yaml" else path.read_bytes()
            if path.stem in ("train", "test") and model.small and shown.exists():
                files[str(inner)] = _with_messages(path, json.loads(shown.read_bytes()))
    return files


def next_steps(folder: Path, template: str, files: Mapping[str, bytes], model: Model) -> str:
    """The message after a run was written: its files, and the commands to go on with."""
    width = max(map(len, files)) + 2
    lines = [f"Wrote the template {template} to {folder}:"]
    for name, content in files.items():
        rows = f"{len(content.splitlines())} rows" if name.endswith(".jsonl") else ""
        lines.append(f"  {name:<{width}}{rows}".rstrip())
    lines += [f"  {model.path:<{width}}the model"] * model.small
    lines += [f"Model {model.path} was {model.remark}"] * bool(model.remark)
    lines += ["Next:"] + [f"  cd {shlex.quote(str(folder))}"] * (folder.resolve() != Path.cwd())
    tests = " ".join(name for name in files if name.startswith("test_"))
    lines += [f"  python -m pytest {tests}", f"  megasync plan {CONFIG}"]
    if takes := TEMPLATES[template].takes:
        lines += [
            "  megasync sft supervised.yaml",
            f"  megasync train {CONFIG} {takes}=EXPORT   # the folder that it prints",
        ]
    else:
        lines.append(f"  megasync train {CONFIG}")
    return "\n".join(lines)


def _with_messages(path: Path, messages: list[Any]) -> bytes:
    """The rows of a file, each with these messages before its question."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    asked = ({**row, "prompt": [*messages, {"role": "user", "content": row["prompt"]}]} for row in rows)
    return "".join(f"{json.dumps(row)}\n" for row in asked).encode()


def _configuration(path: Path, name: str) -> bytes:
    """A further configuration of a run, which has a name of its own."""
    text = path.read_text(encoding="utf-8")
    return commented({"name": f"{name}-{path.stem}"} | yaml.safe_load(text), _head(text, name)).encode()


def _values(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def _head(text: str, name: str) -> str:
    """The comment at the beginning of a file, as one paragraph."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines).replace("{name}", name)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested mappings; where both have a value, that of `above`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
