"""Translates a configuration of another library into megasync's keys, and says what that leaves open.

    file ─▶ options ─▶ rows of the table, one after the other ─▶ keys ─▶ rules of the keys ─▶ configuration
                              │ no row, no value, no counterpart            │ what contradicts
                              └────────────────▶ remarks ◀──────────────────┘

Invariant: every option of the file is either translated or in a remark, and `megasync.config` accepts the
configuration: each value on its own (`_checked`), and all together (`_Keys.settle`). Where two translated keys exclude
one another, one is chosen, and a remark says which.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import MISSING as REQUIRED

from megasync.config.limits import as_typed, limit_of, schema_fields, value_of
from megasync.config.load import entry_of, load_config, section_of, type_name
from megasync.config.megatron_options import check_megatron
from megasync.config.pools import engine_nodes, frozen_models, nodes_needed, pool_specs, trainer_pool
from megasync.config.rules import Refusal, refusals
from megasync.config.schema import Config
from megasync.config.server_args import ROLLOUT_FLAGS
from megasync.errors import ConfigError
from megasync.translate.options import Given, Option, read_arguments, read_flags, read_hydra, read_text, shown
from megasync.translate.script import OTHERS
from megasync.translate.table import COLUMNS, SAME, TABLES, Column, Row
from megasync.translate.values import Keys, Open, Options, Refused, is_sft

Kind = Literal["choice", "open", "without", "unknown"]
READERS: dict[str, Callable[[str, Path, Collection[str]], Given]] = {
    "verl": read_hydra,
    "slime": read_flags,
    "trl": read_arguments,
}
# What a file of a library has, the more telling ones first.
LOOKS = {
    "verl": r"\bactor_rollout_ref\.|^actor_rollout_ref:|\bverl\.(trainer|experimental)\b",
    "slime": r"--rollout-batch-size\b|--hf-checkpoint\b",
    "trl": r"\btrl\b|\b(GRPO|RLOO|SFT)(Config|Trainer)\b|\bnum_generations\b|\bper_device_train_batch_size\b",
    "OpenRLHF": r"\bopenrlhf\b",
    "AReaL": r"\bareal\b|\bgconfig\b|\bmax_head_offpolicyness\b",
    "prime-rl": r"\bprime[-_]rl\b|^\[orchestrator",
    "NeMo-RL": r"\bnemo_rl\b|\bmegatron_cfg\b",
    "rLLM": r"\brllm\b",
    "ms-swift": r"\bswift (rlhf|sft)\b",
    "LLaMA-Factory": r"\bllamafactory\b",
}
# Options that only a supervised training has, and those that only one of rewards has.
_SUPERVISED = {
    "packing",
    "max_seq_length",
    "dataset_text_field",
    "completion_only_loss",
    "assistant_only_loss",
    "max_length",
}
_REWARDED = {"reward_funcs", "num_generations", "max_completion_length", "reward_weights", "reward_model_name_or_path"}
# Keys of a supervised run whose rules are checked, as its preflight does.
_SFT_RULES = ("trainer", "sft")
_MODEL = "model"
# Rounds in which contradictions are resolved; each takes at least one key back.
_MOST_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Translated:
    """An option of the file, and the key and value that it became; ``note`` says how the two differ."""

    option: str
    key: str
    value: Any
    note: str


@dataclass(frozen=True, slots=True)
class Remark:
    """A deviation from the file: a choice, an open value, an option without a counterpart, or an unknown one."""

    kind: Kind
    option: str
    text: str


@dataclass(frozen=True, slots=True)
class Translation:
    """A configuration as nested mappings of the keys that differ from their defaults, and what is to be said of it."""

    source: str
    path: Path
    config: dict[str, Any]
    columns: tuple[Column, ...]
    translated: tuple[Translated, ...]
    remarks: tuple[Remark, ...]
    # Keys that the library's own defaults say, where megasync's differ and the file is silent.
    defaults: tuple[tuple[str, Any], ...]
    supervised: bool

    def of(self, kind: Kind) -> list[Remark]:
        return [remark for remark in self.remarks if remark.kind == kind]


def translate(source: str, path: str | Path) -> Translation:
    """The translation of a file of verl, slime or TRL, which is read and not run.

    Raises ConfigError for an unknown library, and for a file that cannot be read or is no configuration of it.
    """
    if source not in TABLES:
        near = difflib.get_close_matches(source.lower(), TABLES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{source!r} is not translated; name one of {', '.join(TABLES)}{hint}")
    path = Path(path).expanduser()
    text = read_text(path)
    known = {name for row in TABLES[source] for name in row.spellings if "*" not in name}
    try:
        given = READERS[source](text, path, known)
        _check_library(source, given, known, text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if _trains_on_answers(source, given):
        given.program += " sft"
    return _Translator(source, path, given).translation()


def _check_library(source: str, given: Given, known: Collection[str], text: str) -> None:
    """Refuses a file of another library, or of a training that megasync does not have."""
    if others := [name for name in OTHERS if source == "trl" and name in given.program.split()]:
        raise ConfigError(f"{others[0]} trains on preferences or scores that are stored, which megasync does not do")
    scores = {name: len(re.findall(pattern, text, re.MULTILINE)) for name, pattern in LOOKS.items()}
    likeliest = max(scores, key=lambda name: scores[name])
    recognised = sum(name in known for name in given.options)
    if recognised >= 2 or (recognised and scores[source]):
        return
    if likeliest != source and scores[likeliest]:
        fix = f"use --from {likeliest}" if likeliest in TABLES else f"only {', '.join(TABLES)} are translated"
        raise ConfigError(f"it looks like a file of {likeliest}, not of {source}; {fix}")
    if not given.options or not recognised:
        said = "; ".join(given.notes[:2])
        raise ConfigError(f"it has no option of {source}" + (f" ({said})" if said else "; check the path"))


def _trains_on_answers(source: str, given: Given) -> bool:
    names = given.options.keys()
    if source == "slime":
        loss = given.options.get("loss-type", Option(""))
        return loss.value == "sft_loss"
    if source == "verl":
        return "sft" in given.program or (
            not any(name.startswith("actor_rollout_ref.") for name in names)
            and any(
                name in names for name in ("model.partial_pretrain", "data.max_length", "data.multiturn.messages_key")
            )
        )
    said = "SFT" in given.program or " sft " in f" {given.program} "
    return said or (not names & _REWARDED and "GRPO" not in given.program and bool(names & _SUPERVISED))


class _Translator:
    """The rows of a library's table, applied to a file's options."""

    def __init__(self, source: str, path: Path, given: Given) -> None:
        self._source, self._path, self._given = source, path, given
        probe = Options(given, {})
        self._supervised = is_sft(probe)
        self._rows = [row for row in TABLES[source] if row.sft in (None, self._supervised)]
        defaults = {row.spellings[0]: row.default for row in self._rows if row.default is not SAME and row.names}
        self._options = Options(given, defaults)
        self._translated: list[Translated] = []
        self._remarks: list[Remark] = [Remark("open", "", note) for note in dict.fromkeys(given.notes)]
        self._keys = _Keys(self._supervised)

    def translation(self) -> Translation:
        named = [row for row in self._rows if "*" not in row.names]
        matched = self._by_option(named)
        # What the file says comes before what its library takes by default.
        for silent in (False, True):
            for row in named:
                if row.key and self._is_silent(row) == silent:
                    self._apply(row, silent)
        for row in self._rows:
            if row.silent and self._is_silent(row):
                self._remark("open", "", row.silent)
        done = {entry.option for entry in self._translated} | {remark.option for remark in self._remarks}
        for name in self._given.options:
            if name not in done:
                self._rest(name, matched.get(name))
        if f"{_MODEL}.path" not in self._keys.values:
            self._remark("open", "", "the file names no model: set model.path")
        rows = "sft.train" if self._supervised else "data.train"
        if not any(key.startswith((f"{rows}.", "data.sets.")) for key in self._keys.values):
            self._remark(
                "open", "", f"the file names no training rows that are read: set {rows}.kind and {rows}.source"
            )
        if "schedule.total_steps" not in self._keys.values and not self._supervised:
            steps = _defaults().schedule.total_steps
            self._remark("open", "", f"the file does not say how many steps are trained: {steps} are, by default")
        for text in self._keys.settle():
            self._remark("choice", "", text)
        kept = self._keys.kept()
        return Translation(
            self._source,
            self._path,
            _nested(kept),
            COLUMNS[self._source],
            tuple(self._translated),
            tuple(dict.fromkeys(self._remarks)),
            tuple((key, value) for key, value in kept.items() if key not in self._keys.said),
            self._supervised,
        )

    def _by_option(self, rows: list[Row]) -> dict[str, Row]:
        """The row without a key, if there is one, that says something of each option."""
        return {name: row for row in rows if not row.key for name in row.spellings}

    def _is_silent(self, row: Row) -> bool:
        return not any(name in self._options for name in row.spellings)

    def _apply(self, row: Row, silent: bool) -> None:
        if silent and row.names and row.default is SAME:
            return
        names = [name for name in row.spellings if name in self._options]
        name = names[0] if names else row.spellings[0] if row.names else ""
        try:
            if row.where is not None and not row.where(self._options):
                return
            value = self._options[name] if name else None
            self._set(row, name, row.key, value, silent)
        except Open as error:
            if not silent:
                self._remark("open", name, str(error).removeprefix(f"{name}: "))
        except Refused as error:
            if not silent:
                self._remark("without", name, str(error))
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
            if not silent:
                self._remark("without", name, f"{shown(self._given.options[name])} is not of the expected form")

    def _set(self, row: Row, name: str, key: str, value: Any, silent: bool) -> None:
        result = value if row.value is None else row.value(value, self._options)
        keys = result if isinstance(result, Keys) else Keys({key: result})
        if keys.lost and not silent:
            self._remark("open", name, keys.lost)
        for each, wanted in keys.items():
            made = _checked(each, wanted)
            before = self._keys.values.get(each)
            if each in self._keys.said and before != made:
                if not silent:
                    told = f"{each}={as_typed(before)} is kept, which another option says, and not {as_typed(made)}"
                    self._remark("choice", name, told)
                continue
            self._keys.put(each, made, said=not silent)
            if not silent:
                self._translated.append(Translated(name, each, made, row.note))
        if not keys and not silent:
            self._translated.append(Translated(name, row.key, keys.said, row.note))

    def _rest(self, name: str, row: Row | None) -> None:
        """An option that no named row with a key has translated."""
        option = self._given.options[name]
        if row is not None:
            self._remark("without", name, row.note)
            return
        for each in self._rows:
            for pattern in each.spellings:
                if "*" in pattern and fnmatchcase(name, pattern):
                    self._starred(each, pattern, name, option)
                    return
                if pattern == name:  # without a key, or its condition does not hold
                    said = f"it has no effect with the other options ({each.key})"
                    self._remark("without", name, said if each.key else each.note)
                    return
        if any(name in each.spellings for each in TABLES[self._source]):
            training = "supervised training" if self._supervised else "training on rewards"
            self._remark("without", name, f"it has no effect in {training}")
            return
        near = difflib.get_close_matches(name, [one for each in self._rows for one in each.spellings], 1, 0.8)
        hint = f"; near: `{near[0]}`" if near else ""
        self._remark("unknown", name, f"{shown(option)}{hint}")

    def _starred(self, row: Row, pattern: str, name: str, option: Option) -> None:
        if not row.key:
            self._remark("without", name, row.note)
            return
        head, _, tail = pattern.partition("*")
        rest = name[len(head) : len(name) - len(tail) if tail else None]
        key = row.key.replace("*", rest.replace("_", "-") if "--*" in row.key else rest)
        try:
            if option.unresolved:
                raise Open(option.unresolved)
            self._set(row, name, key, option.value, silent=False)
        except Open as error:
            self._remark("open", name, str(error))
        except Refused as error:
            self._remark("without", name, str(error))

    def _remark(self, kind: Kind, option: str, text: str) -> None:
        self._remarks.append(Remark(kind, option, text))


# Single keys


_hints = cache(get_type_hints)


@cache
def _defaults() -> Config:
    return load_config({_MODEL: {"path": "-"}})


def _field_of(key: str) -> tuple[Any, Any]:
    """Type and field of a key, entries of named sections included; None and None for one of free-form pairs."""
    cls: type = Config
    parts = key.split(".")
    while parts:
        name = parts.pop(0)
        field = next((each for each in schema_fields(cls) if each.name == name), None)
        if field is None:
            raise Refused(f"{key} is no key of megasync")
        hint = _hints(cls)[name]
        if not parts:
            return hint, field
        if (below := section_of(hint)) is not None:
            cls = below
        elif (entry := entry_of(hint)) is not None:
            parts.pop(0)
            cls = entry
        else:
            kind = get_args(hint)[1]
            return (None if kind is Any else kind), None
    raise Refused(f"{key} is a section")


def _sections_of(key: str) -> list[tuple[str, type]]:
    """The sections that hold a key, by their names, with their classes."""
    found: list[tuple[str, type]] = []
    cls: type | None = Config
    parts = key.split(".")
    at = 0
    while cls is not None and at < len(parts) - 1:
        hint = _hints(cls)[parts[at]]
        cls, entry = section_of(hint), entry_of(hint)
        at += 1 if entry is None else 2
        cls = cls or entry
        if cls is not None:
            found.append((".".join(parts[:at]), cls))
    return found


def _checked(key: str, value: Any) -> Any:
    """The value in the type of its key. Raises Open or Refused for one that the key does not take."""
    hint, item = _field_of(key)
    if isinstance(value, str) and re.sub(r"\$\{oc\.env:\w+(,[^{}]*)?\}", "", value).count("${"):
        raise Open(f"{value} is a reference that is not read")
    if key.startswith("rollout.server_args."):
        flag = key.removeprefix("rollout.server_args.")
        if (why := ROLLOUT_FLAGS.refusal({flag: value})) is not None:
            raise Refused(f"rollout.server_args {why}")
    if key.startswith("trainer.megatron."):
        _, _, table, name = key.split(".", 3)
        try:
            check_megatron({table: {name: value}})
        except ConfigError as error:
            raise Refused(str(error)) from None
    if hint is None:
        return value
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    made = next((made for kind in kinds if (made := _typed(value, kind, hint)) is not None), None)
    if made is None:
        if isinstance(value, str) and "${oc.env:" in value:
            raise Open(f"{value} comes from the environment; write the value into {key}")
        raise Refused(f"{value!r:.80} is not {type_name(hint)}, which {key} takes")
    limit = None if item is None else limit_of(item)
    if limit is not None and (why := limit.refusal(made)) is not None:
        raise Refused(f"{key}={as_typed(made)} {why}")
    return made


def _typed(value: Any, kind: Any, hint: Any) -> Any:
    """A value of one type, None if it is none: whole floats count as integers, numbers as text."""
    if get_origin(hint) is list or get_origin(kind) is list:
        inner = get_args(hint if get_origin(hint) is list else kind)[0]
        made = [_typed(each, inner, inner) for each in (value if isinstance(value, list) else [value])]
        return None if None in made else made
    if get_origin(hint) is dict:
        return value if isinstance(value, Mapping) else None
    if kind is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if kind in (int, float) and isinstance(value, int | float):
        return None if kind is int and value != int(value) else kind(value)
    if kind is str and isinstance(value, str | int | float):
        return str(value)
    return None


# All keys together


class _Keys:
    """The keys by their dotted names. ``said`` are those that the file says, and not its library's defaults."""

    def __init__(self, supervised: bool) -> None:
        self.values: dict[str, Any] = {}
        self.said: set[str] = set()
        self._chosen: set[str] = set()
        self._supervised = supervised

    def put(self, key: str, value: Any, said: bool) -> None:
        self.values[key] = value
        self.said |= {key} if said else set()

    def settle(self) -> list[str]:
        """Makes the keys fit together, and returns what was chosen for that."""
        chosen = [*self._incomplete(), *self._evaluation()]
        config = self._config()
        for _ in range(_MOST_ROUNDS):
            chosen += self._contradictions(config)
            if not (lowered := self._whole_nodes(config)):
                break
            chosen += lowered
        return [text for text in chosen + self._several_nodes(config) if text]

    def kept(self) -> dict[str, Any]:
        """The keys that differ from their defaults."""
        return {key: value for key, value in self.values.items() if not _is_default(key, value)}

    def _contradictions(self, config: Config) -> list[str]:
        """Takes back keys until no rule is broken."""
        chosen = []
        for _ in range(_MOST_ROUNDS):
            facts = {
                "run's held-out sets": (config.data.eval is not None) + len(config.eval.sets),
                "run's rollout.agent or verifiers environment": config.rollout.agent is not None,
                "run's other models": len(frozen_models(config)),
                "run's models on rollout servers": 0,
                "server's number of nodes": engine_nodes(config),
            }
            within = _SFT_RULES if self._supervised else ("",)
            refusal = next(refusals(config, facts, within=within, without=() if self._supervised else ("sft",)), None)
            if refusal is None:
                break
            chosen.append(self._resolve(refusal, config))
        return chosen

    def _config(self) -> Config:
        values = _nested(self.values)
        values.setdefault(_MODEL, {}).setdefault("path", "-")
        return load_config(values, unset=True)

    def _incomplete(self) -> list[str]:
        """Leaves out sections of which the file says a part, and not what they must have."""
        chosen = []
        for prefix, cls in dict.fromkeys(each for key in self.values for each in _sections_of(key)):
            required = [item.name for item in schema_fields(cls) if item.default == REQUIRED]
            missing = [name for name in required if f"{prefix}.{name}" not in self.values]
            lost = [key for key in self.values if key.startswith(f"{prefix}.")]
            if not missing or prefix == _MODEL or not lost:
                continue
            # A reward that asks a model goes with it.
            name = prefix.rpartition(".")[2]
            lost += [key for key in self.values if key == f"rollout.rewards.{name}.model"]
            for key in lost:
                del self.values[key]
            chosen.append(f"{prefix} is left out, because the file does not say {' and '.join(missing)}")
        return chosen

    def _evaluation(self) -> list[str]:
        """Without held-out rows there is no evaluation; a greedy response is not repeated."""
        held_out = [key for key in self.values if key.startswith(("data.eval.", "eval.sets."))]
        if not held_out:
            lost = sorted(key for key in self.values if key.startswith("eval."))
            said = [key for key in lost if key in self.said]
            for key in lost:
                del self.values[key]
            return [f"there are no held-out rows, so {', '.join(said)} would say nothing; they are left out"] * bool(
                said
            )
        temperatures = self.values.get("eval.temperatures") or [0.0]
        if self.values.get("eval.repeats", 1) > 1 and max(temperatures) == 0:
            repeats = self.values.pop("eval.repeats")
            return [f"eval.repeats={repeats} is left out: greedy responses (eval.temperatures: [0]) are all the same"]
        return []

    def _choose(self, key: str, value: Any, config: Config) -> None:
        """Sets a key, in the configuration too."""
        self.values[key] = value
        *above, name = key.split(".")
        node: Any = config
        for part in above:
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        if isinstance(node, dict):
            node[name] = value
        else:
            setattr(node, name, value)

    def _resolve(self, refusal: Refusal, config: Config) -> str:
        """Resolves a contradiction: by a key of which the file says nothing, otherwise by that which has the rule."""
        # A key that one rule has changed is left alone by the others, as long as they have another fix.
        free = [fix for fix in refusal.fixes if fix[0] not in self._chosen]
        fixes = [fix for fix in free if fix[0] not in self.said] or free[-1:] or list(refusal.fixes[-1:])
        message = refusal.message.rpartition("; ")[0] or refusal.message
        if not fixes:
            key = next(key for key in refusal.keys if key in self.values)
            self._choose(key, value_of(_defaults(), key), config)
            return f"{message}. Chosen: {key} is left out"
        key, value = fixes[0]
        self._choose(key, value, config)
        self._chosen.add(key)
        if key not in self.said and _is_default(key, value):
            return ""  # it was the library's default, which says nothing here
        return f"{message}. Chosen: {key}={as_typed(value)}"

    def _whole_nodes(self, config: Config) -> list[str]:
        """Lowers numbers of replicas until pools fill whole nodes. Rules that are broken by that change other keys."""
        chosen = []
        for key in ("trainer.data_parallel", "rollout.servers"):
            before = count = value_of(config, key)
            for count in range(before, max(0, before - _MOST_ROUNDS), -1):
                self._choose(key, count, config)
                if self._fits(key, config):
                    break
            if count < before:
                self._chosen.add(key)
                chosen.append(f"{key}={before} would leave parts of nodes. Chosen: {key}={count}")
        return chosen

    def _several_nodes(self, config: Config) -> list[str]:
        """Joins a cluster where there are several nodes."""
        try:
            specs = {"trainer": trainer_pool(config)} if self._supervised else pool_specs(config)
        except ConfigError as error:
            return [f"{error}"]
        nodes = nodes_needed(specs, config.cluster.devices_per_node)
        if nodes > 1:
            self.values |= {"cluster.address": "auto", "cluster.host": "auto"}
            return [f"{nodes} nodes are needed, so cluster.address=auto joins the Ray cluster that has them"]
        return []

    def _fits(self, key: str, config: Config) -> bool:
        try:
            trainer_pool(config) if key.startswith("trainer") or self._supervised else pool_specs(config)
        except ConfigError:
            return False
        return True


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        *above, name = key.split(".")
        node = result
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    return result


def _is_default(key: str, value: Any) -> bool:
    try:
        return value_of(_defaults(), key) == value
    except AttributeError:  # in a named section, or in free-form pairs
        return False
