"""Loads YAML files and `key=value` overrides into one typed `Config`.

Layers are merged from the outermost base to the overrides. Each layer is validated against the schema before it is
merged, so an error always names the file or override that contains the refused key or value.

Invariant: what the environment gives (`${oc.env:NAME}`, or any other resolver of OmegaConf) is saved as it was written,
so no secret from the environment reaches a file; only numbers are saved as they are, and names of models with their
commit (`models.hub`). `_saved` guarantees it. A resumed run reads the environment again.
"""

from __future__ import annotations

import difflib
import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, is_dataclass
from functools import cache, reduce
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megasync.base.files import PRIVATE, atomic_write
from megasync.base.shipped import ROOT
from megasync.config.limits import PATH, SHOWN_CHARACTERS, as_typed, keys_of, limit_of, path_problem, schema_fields
from megasync.config.schema import Config
from megasync.errors import ConfigError

BASE_KEY = "base"
# Files in a run's directory: its resolved configuration, and the names of what the caller passed from Python and must
# pass again on resume.
CONFIG_FILE = "config.yaml"
CUSTOM_FILE = "custom.json"
# In the run directory of a supervised run: number and digest of its rows.
ROWS_FILE = "sft.json"
# In the run directory of a service: its ledger, checkpoints and states of models; and the keys of its tenants, if
# `serve.keys` names no file.
SERVICE_FOLDER, TENANTS_FILE = "service", "keys"
# Of `rollout.agent: external`: the folder with the addresses of the gateways, and the file in it with their key.
SESSIONS_FOLDER, SESSIONS_KEY = "sessions", "key"

# In a value, a call of a resolver; and a reference to another key, with the points that make it a relative one.
_CALL = re.compile(r"\$\{\s*[\w.]+\s*:")
_REFERENCE = re.compile(r"\$\{\s*(\.*)([^${}:]*?)\s*\}")
# A plain scalar that YAML reads as a number in base 8 or 60.
_ODD_NUMBER = re.compile(r"[-+]?(0_*[0-7][0-7_]*|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
# The error of a variable that is not set.
_UNSET = re.compile(r"Environment variable '(.+)' not found")
_Path = tuple[str, ...]


# What parsing text, or making plain values of what it holds, can raise: ValueError includes bytes that are not UTF-8.
UNREADABLE = (
    yaml.YAMLError,
    OmegaConfBaseException,
    ValueError,
    TypeError,
    RecursionError,
    OverflowError,
    AttributeError,
    LookupError,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of keys, as plain data. `place` identifies it in messages: the file, or the override as typed."""

    place: str
    values: dict[Any, Any]


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), unset: bool = False) -> Config:
    """Reads a YAML file (or a mapping of the same form), its bases, and `overrides` such as `trainer.data_parallel=2`.

    With `unset`, text from variables that are not set stays as written: who reads what a run has done needs no secrets.
    Raises ConfigError for a missing file, a cycle of bases, an unknown key, a wrong type, a variable that is not set or
    a missing required key. The result is well-typed; `check_config` checks that its keys do not contradict each other.
    """
    layers = _mapping_layers(source) if isinstance(source, Mapping) else _file_layers(_located(source), ())
    layers += [_override_layer(text) for text in overrides]
    merged = _schema()
    for layer in layers:
        merged = _merge(merged, layer)
    return _to_object(merged, unset)


def save_config(config: Config, path: str | Path) -> None:
    """Writes the configuration as one YAML file without a base; `load_config` reads it back unchanged.

    References to other keys are resolved, text that the environment gives stays as it was written. Only the user who
    runs this can read the file, which may hold secrets. The write is atomic: a concurrent reader sees either the old or
    the new file. Raises OSError.
    """
    atomic_write(path, OmegaConf.to_yaml(OmegaConf.create(_escaped(_saved(config)))), PRIVATE)


def saved_values(config: Config) -> dict[str, Any]:
    """The configuration as plain data, as it is saved; it may hold secrets that were written into it (`masked`)."""
    return _plain_data(_saved(config))


def remember(run_dir: Path, key: str, value: Any) -> None:
    """Changes one key in the saved configuration of a run, for a later resume. Raises OSError if the write fails."""
    save_config(load_config(run_dir / CONFIG_FILE, [f"{key}={value}"], unset=True), run_dir / CONFIG_FILE)


def custom_of(run_dir: Path) -> list[str]:
    """The names of what a run got from Python. Raises ConfigError for a file that does not list them."""
    file = run_dir / CUSTOM_FILE
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(names, list | dict) or not all(isinstance(name, str) for name in names):
            raise ValueError("it must hold names")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}; it lists what the run got from Python; write [] into it if that was "
            f"nothing"
        ) from None
    return list(names)


class SchemaItem(NamedTuple):
    """A key or section of the schema: its name, field and type, and why a resumed run cannot change it, or ""."""

    key: str
    field: Field[Any]
    hint: Any
    fixed: str


def schema_items(cls: type = Config, prefix: str = "", fixed: str = "") -> Iterator[SchemaItem]:
    """Yields every key and section of the schema; why a section is fixed holds for its keys too."""
    hints = get_type_hints(cls)
    for field in schema_fields(cls):
        item = SchemaItem(f"{prefix}{field.name}", field, hints[field.name], field.metadata.get("fixed") or fixed)
        yield item
        if (section := section_of(item.hint)) is not None:
            yield from schema_items(section, f"{item.key}.", item.fixed)


def schema_keys(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every key of the schema with its annotated type, including sections: ("trainer", TrainerConfig), ..."""
    return ((item.key, item.hint) for item in schema_items(cls, prefix))


# Layers


def _mapping_layers(values: Mapping[str, Any]) -> list[Layer]:
    keys = dict(values)
    base = keys.pop(BASE_KEY, None)
    below = [] if base is None else _file_layers(_located(base), ())
    try:
        return [*below, Layer("the given mapping", _plain(OmegaConf.create(keys)))]
    except UNREADABLE as error:
        raise ConfigError(f"the given mapping cannot be read as a configuration: {_first_line(error)}") from None


def _file_layers(path: Path, above: tuple[Path, ...]) -> list[Layer]:
    """The layers of the file and its bases, outermost base first. `above` is the chain of files that led here."""
    if path in above:
        chain = " -> ".join(str(p) for p in (*above[above.index(path) :], path))
        raise ConfigError(f"base files form a cycle: {chain}; remove `base` from one of them")
    values = _read(path, above)
    base = values.pop(BASE_KEY, None)
    layer = Layer(str(path), values)
    if base is None:
        return [layer]
    if not isinstance(base, str) or "${" in base:
        raise ConfigError(f"{path}: base={base!r} must be the path of one YAML file, relative to this file")
    return [*_file_layers(_located(base, path.parent), (*above, path)), layer]


def _located(text: str | Path, folder: Path = Path()) -> Path:
    """The absolute path of a file given relative to a folder. Raises ConfigError for an invalid path."""
    if (problem := path_problem(str(text))) is not None:
        raise ConfigError(
            f"configuration file {str(text)[:SHOWN_CHARACTERS]!r} is not a usable path: {problem}; check it"
        )
    return (folder / Path(text).expanduser()).resolve()


def _read(path: Path, above: tuple[Path, ...]) -> dict[Any, Any]:
    named_by = f" (named as `base` in {above[-1]})" if above else ""
    if (problem := path_problem(str(path))) is not None:
        raise ConfigError(f"configuration file {path}{named_by} is not a usable path: {problem}; check it")
    if not path.is_file():
        kind = "is a folder, not a YAML file" if path.is_dir() else "does not exist"
        here = Path.cwd()
        shipped = path.is_relative_to(here) and (ROOT / path.relative_to(here)).is_file()
        fix = ", or copy the shipped one here: megasync files ." if shipped else ""
        raise ConfigError(f"configuration file {path}{named_by} {kind}; check the path{fix}")
    try:
        _refuse_odd_numbers(path.read_text(encoding="utf-8"), str(path))
        values = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(
            f"configuration file {path}{named_by} cannot be read: {error.strerror}; check its permissions"
        ) from None
    except UNREADABLE as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{path} must contain `key: value` pairs at its top level")
    return _plain(values)


def _override_layer(text: str) -> Layer:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or key != key.strip():
        raise ConfigError(f"override {text!r} is not of the form key=value, for example trainer.data_parallel=2")
    try:
        _refuse_odd_numbers(value, f"override {text!r}")
        return Layer(f"override {text!r}", _plain(OmegaConf.from_dotlist([text])))
    except UNREADABLE as error:
        raise ConfigError(f"override {text!r:.{SHOWN_CHARACTERS}} cannot be read: {_first_line(error)}") from None


def _refuse_odd_numbers(text: str, place: str) -> None:
    """Raises ConfigError for a number that YAML takes in base 8 (010) or 60 (1:30), which nobody means."""
    for token in yaml.scan(text, yaml.SafeLoader):
        if isinstance(token, yaml.ScalarToken) and token.plain and _ODD_NUMBER.fullmatch(token.value):
            number = yaml.safe_load(token.value)
            raise ConfigError(
                f"{place}: YAML reads {token.value} as {number}, a number in base {60 if ':' in token.value else 8}; "
                f"write what is meant in base 10, or quote it if it is text"
            )


def _plain(values: DictConfig) -> dict[Any, Any]:
    """The values as plain data; references to other keys stay unresolved."""
    plain = OmegaConf.to_container(values, resolve=False)
    assert isinstance(plain, dict)
    return plain


# Merging


@cache
def _pickled_schema() -> bytes:
    return pickle.dumps(OmegaConf.structured(Config))


def _schema() -> DictConfig:
    """Returns a new schema with its defaults, which a merge changes. Copying or building one takes longer."""
    return pickle.loads(_pickled_schema())


def _merge(merged: DictConfig, layer: Layer) -> DictConfig:
    if layer.values.get("eval", layer) is None:
        merged, layer = _without_evaluation(merged, layer)
    _refuse_unknown_keys(layer.values, Config, "", layer.place)
    try:
        result = OmegaConf.unsafe_merge(merged, layer.values)
    except OmegaConfBaseException as error:
        key = error.full_key or "?"
        expected = dict(schema_keys()).get(key)
        if expected is None:  # an entry of a list or free-form dictionary: report its parent's type
            key = key.split("[")[0]
            expected = dict(schema_keys()).get(key)
        raise ConfigError(
            f"{layer.place}: {key}={_value_at(layer.values, key)!r} has the wrong type; "
            f"expected {type_name(expected)}" + ("" if expected else f" ({_first_line(error)})")
        ) from None
    assert isinstance(result, DictConfig)
    return result


def _without_evaluation(merged: DictConfig, layer: Layer) -> tuple[DictConfig, Layer]:
    """Applies `eval: null`, which turns evaluation off: no held-out set, and the keys of `eval` at their defaults."""
    data = layer.values.get("data")
    if isinstance(data, Mapping) and data.get("eval") is not None:
        raise ConfigError(f"{layer.place}: eval=null turns evaluation off, but data.eval names a set; remove one")
    off = OmegaConf.unsafe_merge(merged, {"data": {"eval": None}})
    assert isinstance(off, DictConfig)
    off.eval = _schema().eval
    return off, Layer(layer.place, {key: value for key, value in layer.values.items() if key != "eval"})


def _refuse_unknown_keys(values: Mapping[Any, Any], section: type, prefix: str, place: str) -> None:
    annotated = get_type_hints(section)
    hints = {item.name: annotated[item.name] for item in schema_fields(section)}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise ConfigError(f"{place}: unknown key {key!r}{_nearest(str(name), section, prefix)}")
        hint = hints[name]
        if value is None and type(None) not in get_args(hint):
            what = "is empty; give it keys" if section_of(hint) else f"is null or empty; expected {type_name(hint)}"
            raise ConfigError(f"{place}: {key} {what}, or remove it")
        if value is None or str(value).startswith("${"):  # null, or a reference to another key
            continue
        _check_type(key, value, hint, place)
        if (below := section_of(hint)) is not None:
            _refuse_unknown_keys(value, below, f"{key}.", place)
        elif (entry := entry_of(hint)) is not None:
            for entry_name, entry_values in value.items():
                _check_type(f"{key}.{entry_name}", entry_values, entry, place)
                _refuse_unknown_keys(entry_values, entry, f"{key}.{entry_name}.", place)
        elif get_origin(hint) is dict and (plain := get_args(hint)[1]) is not Any:
            for entry_name, entry_value in value.items():
                if entry_value is None:
                    raise ConfigError(f"{place}: {key}.{entry_name} is null or empty; give it a value, or remove it")
                _check_type(f"{key}.{entry_name}", entry_value, plain, place)


def _check_type(key: str, value: Any, hint: Any, place: str) -> None:
    """Raises ConfigError for a value of the wrong type that OmegaConf would convert or merge."""
    is_section = section_of(hint) is not None or get_origin(hint) is dict
    is_list = any(get_origin(kind) is list for kind in (hint, *get_args(hint)))
    not_bool = hint is bool and not isinstance(value, bool | str)
    if isinstance(value, Mapping) != is_section or isinstance(value, list) != is_list or not_bool:
        raise ConfigError(f"{place}: {key}={value!r} has the wrong type; expected {type_name(hint)}")
    # OmegaConf takes any list or mapping as an entry.
    if isinstance(value, list) and (nested := [entry for entry in value if isinstance(entry, Mapping | list)]):
        raise ConfigError(f"{place}: {key} contains {nested[0]!r:.{SHOWN_CHARACTERS}}; expected {type_name(hint)}")
    if isinstance(value, bool) and str in (hint, *get_args(hint)):
        raise ConfigError(f"{place}: {key}={value!r} must be text; quote it, because YAML reads it as a boolean")


def _nearest(name: str, section: type, prefix: str) -> str:
    """A suggestion: the same name in another section, else the most similar name here, else in any section."""
    keys = [key for key, _ in schema_keys()]
    if f"{prefix}{name}" in keys:
        above, _, last = name.rpartition(".")
        return f"; write it as a section, {above.replace('.', ': {')}: {{{last}: ...{'}' * (above.count('.') + 1)}"
    siblings = [item.name for item in schema_fields(section)]
    close = [key for key in keys if key.rpartition(".")[2] == name]
    close = close or [f"{prefix}{near}" for near in difflib.get_close_matches(name, siblings, 1)]
    by_name = {key.rpartition(".")[2]: key for key in keys}
    close = close or [by_name[near] for near in difflib.get_close_matches(name, by_name, 1, 0.75)]
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return f"; the keys of {prefix.rstrip('.') or 'the top level'} are {', '.join(siblings)}"


def _to_object(merged: DictConfig, unset: bool) -> Config:
    written = _from_environment(merged)
    if unset:
        for path, text in written.items():
            _keep_unset(merged, path, text)
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"{', '.join(missing)} must be set; name it in the file or as {missing[0]}=VALUE")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key, why = error.full_key or "the configuration", _first_line(error)
        if variable := _UNSET.search(why):
            raise ConfigError(
                f"{key} takes its value from the environment variable {variable[1]!r}, which is not set here; set it"
            ) from None
        raise ConfigError(f"{key} cannot be resolved: {why}") from None
    assert isinstance(config, Config)
    if not config.data.prompt.template_options:
        config.data.prompt.template_options = dict(config.rollout.chat.template_options)
    # Expands `~` in every path here, so that no other code has to.
    for _, section, item in keys_of(config):
        if limit_of(item) is PATH and (path := getattr(section, item.name)) is not None:
            setattr(section, item.name, os.path.expanduser(path))
    values = {path: (text, reduce(_entry, path, config)) for path, text in written.items()}
    # Numbers are no secrets: a resumed run goes on with those that it began with.
    config.as_written = {path: each for path, each in values.items() if not isinstance(each[1], int | float | None)}
    return config


# What the environment gives


def _from_environment(merged: DictConfig) -> dict[_Path, str]:
    """The values that a resolver gives, directly or through references to other keys, as they are written."""
    texts = dict(_interpolations(merged, ()))
    paths = {path for path, text in texts.items() if _CALL.search(text) or text.count("${") > len(_refer(path, text))}
    while more := {
        path
        for path, text in texts.items()
        if path not in paths and any(_within(place, source) for place in _refer(path, text) for source in paths)
    }:
        paths |= more
    return {path: texts[path] for path in texts if path in paths}


def _interpolations(node: DictConfig | ListConfig, above: _Path) -> Iterator[tuple[_Path, str]]:
    """Every value that refers to something else, with its path."""
    for key in range(len(node)) if isinstance(node, ListConfig) else list(node):
        child: Any = node._get_node(key)
        path = (*above, str(key))
        if child is not None and child._is_interpolation():
            yield path, child._value()
        elif isinstance(child, DictConfig | ListConfig) and not child._is_missing() and not child._is_none():
            yield from _interpolations(child, path)


def _refer(path: _Path, text: str) -> list[_Path]:
    """The paths that a value refers to."""
    places: list[_Path] = []
    for points, name in _REFERENCE.findall(text):
        start = path[: len(path) - len(points)] if points else ()
        places.append((*start, *filter(None, re.split(r"[.\[\]]", name))))
    return places


def _within(one: _Path, other: _Path) -> bool:
    """Whether one of the two paths is the other, or leads to something within it."""
    common = min(len(one), len(other))
    return one[:common] == other[:common]


def _keep_unset(merged: DictConfig, path: _Path, text: str) -> None:
    """Makes a value that cannot be resolved the text that is written there."""
    *above, last = path
    node: Any = merged
    for key in above:
        node = node._get_node(int(key) if isinstance(node, ListConfig) else key)
    key: Any = int(last) if isinstance(node, ListConfig) else last
    try:
        node[key]
    except OmegaConfBaseException:
        # A key that takes no text keeps its error.
        with suppress(OmegaConfBaseException):
            node[key] = _escaped(text)


def _saved(config: Config) -> Any:
    """The configuration as plain data, with `as_written` in place of the values that it is about.

    Texts are `_Written` there; every other text is a value.
    """
    values: Any = _plain_data(config)
    for path, (text, value) in config.as_written.items():
        holder = reduce(_entry, path[:-1], values)
        # What was changed since is no longer what was written.
        if _plain_data(_entry(holder, path[-1])) == _plain_data(value):
            holder[int(path[-1]) if isinstance(holder, list) else path[-1]] = _Written(text)
    return values


class _Written(str):
    """Text with references that OmegaConf resolves."""


def _plain_data(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain_data(getattr(value, item.name)) for item in schema_fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain_data(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(entry) for entry in value]
    return str(value) if isinstance(value, _Written) else value


def _escaped(value: Any) -> Any:
    """Plain data in which OmegaConf finds no reference except in `_Written` texts."""
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    if isinstance(value, str) and not isinstance(value, _Written):
        # A backslash before a reference is one more to OmegaConf.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return str(value) if isinstance(value, _Written) else value


def _entry(node: Any, key: str) -> Any:
    if is_dataclass(node):
        return getattr(node, key)
    if isinstance(node, list):
        return node[int(key)] if int(key) < len(node) else None
    return next((value for name, value in node.items() if str(name) == key), None) if isinstance(node, dict) else None


# Types


def section_of(hint: Any) -> type | None:
    """The dataclass in a type such as `DatasetConfig | None`; None if there is none, or for a dictionary."""
    return None if get_origin(hint) is dict else _dataclass_in(hint, *get_args(hint))


def entry_of(hint: Any) -> type | None:
    """The dataclass of the values in a type such as `dict[str, RewardConfig]`; None for other types."""
    return _dataclass_in(*get_args(hint)) if get_origin(hint) is dict else None


def _dataclass_in(*types: Any) -> type | None:
    return next((kind for kind in types if isinstance(kind, type) and is_dataclass(kind)), None)


def _value_at(values: dict[Any, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return node
        node = node[part]
    return node


def type_name(hint: Any) -> str:
    """A type of the schema in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in words:
        return words[hint]
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(type_name(t) for t in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(as_typed, get_args(hint)))
    if get_origin(hint) is list:
        return f"a list in which each entry is {type_name(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "`key: value` pairs"
    if is_dataclass(hint):
        return f"a section with {', '.join(item.name for item in schema_fields(hint))}"
    return "another type"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
