"""The options that a configuration file of another library gives, whatever form the file has.

    Hydra overrides, flags     a shell script: the words of its training command (`shell`)
    arguments of a call        a Python script: its syntax tree (`script`)
    keys                       a YAML file

Invariant: nothing of the file is run, imported or guessed. An option is a value, or says why it has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megasync.errors import ConfigError
from megasync.translate.script import read_script
from megasync.translate.shell import Command, Word, read_commands

# Larger files, deeper ones and ones with more keys are no configurations.
MOST_BYTES, DEEPEST, MOST_OPTIONS = 2**20, 50, 5_000
_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)(?:=(.*))?", re.DOTALL)
_SWEEP = re.compile(r"(choice|range|interval|glob|shuffle|sort)\(")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:\w+(,[^{}$]*)?\}")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError, AttributeError)


@dataclass(frozen=True, slots=True)
class Option:
    """A value that a file gives, or ``unresolved``: why it cannot be known without running something."""

    value: Any
    unresolved: str = ""


@dataclass(slots=True)
class Given:
    """A file as it was read: its options by name, the words before them, and notes about the rest."""

    options: dict[str, Option] = field(default_factory=dict[str, Option])
    # The program, or the names of the classes that are called.
    program: str = ""
    notes: list[str] = field(default_factory=list[str])

    def give(self, name: str, option: Option) -> None:
        """Adds an option; the last value of a name counts, as in all of these libraries."""
        before = self.options.get(name)
        if before is not None and before != option:
            self.notes.append(f"`{name}` is given twice, as {shown(before)} and {shown(option)}; the last one counts")
        if len(self.options) >= MOST_OPTIONS:
            raise ConfigError(f"there are more than {MOST_OPTIONS:,} options")
        self.options[name] = option


def shown(option: Option) -> str:
    """The value of an option for a message."""
    if option.unresolved:
        return f"unresolved ({option.unresolved})"
    return f"`{option.value}`" if len(str(option.value)) <= 60 else f"`{str(option.value)[:57]}...`"


def read_text(path: Path) -> str:
    """The text of a configuration file. Raises ConfigError for what is none."""
    if not path.is_file():
        said = "is a folder" if path.is_dir() else "does not exist" if not path.exists() else "is not a regular file"
        raise ConfigError(f"{path} {said}; name a script or YAML file")
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path} is larger than {MOST_BYTES // 2**20} MiB, which no configuration is; check the path")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ConfigError(f"{path} is not UTF-8 text; name a script or YAML file")
    return text


def is_yaml(path: Path) -> bool:
    return path.suffix.lower() in (".yaml", ".yml")


# By library


def read_hydra(text: str, path: Path, known: Collection[str]) -> Given:
    """Hydra's overrides in a shell script, or the keys of a YAML file."""
    if is_yaml(path):
        given = _read_yaml(text)
    elif path.suffix == ".py":
        raise ConfigError("it is a Python script; name the shell script with the overrides, or the YAML file")
    else:
        given = _from_command(text, known, lambda word: _override_name(word.text), _overrides)
    for name, option in given.options.items():
        given.options[name] = _referenced(option, given.options, 0)
    return given


def read_flags(text: str, path: Path, known: Collection[str]) -> Given:
    """The flags of a shell script, by their names without dashes; those of a YAML file too."""
    if is_yaml(path):
        return _read_yaml(text)
    if path.suffix == ".py":
        raise ConfigError("it is a Python script; name the shell script with the flags")
    return _from_command(text, known, _flag_name, _flags)


def read_arguments(text: str, path: Path, known: Collection[str]) -> Given:
    """Arguments in a Python script, a YAML file or a shell script, whose flags have - or _ in their names."""
    if is_yaml(path):
        return _read_yaml(text)
    if path.suffix == ".py":
        script = read_script(text)
        given = Given(program=" ".join(script.classes), notes=script.notes)
        for name, (value, unresolved) in script.arguments.items():
            for key, each in _leaves({name: value}, (), 0):
                given.give(key, Option(each, unresolved))
        return given

    def name_of(word: Word) -> str:
        return _flag_name(word).replace("-", "_")

    given = _from_command(text, known, name_of, _flags)
    given.options = {name.replace("-", "_"): option for name, option in given.options.items()}
    config = given.options.get("config")
    if config is None or config.unresolved:
        return given
    for folder in (Path(), path.parent):
        if (file := folder / str(config.value)).is_file():
            below = _read_yaml(read_text(file))
            given.notes.append(f"`{config.value}` is read too; the command's own arguments are laid over it")
            del given.options["config"]
            return Given({**below.options, **given.options}, given.program, [*below.notes, *given.notes])
    given.notes.append(f"`--config {config.value}` is not found from here; translate that file instead")
    return given


# YAML


def _read_yaml(text: str) -> Given:
    given = Given()
    for name, value in _leaves(_load(text), (), 0):
        given.give(name, parsed(value) if isinstance(value, str) and "${" in value else Option(value))
    if isinstance(defaults := given.options.get("defaults"), Option) and isinstance(defaults.value, list):
        others = [str(each) for each in defaults.value if each != "_self_"]
        given.program = " ".join(others)
        given.notes.append(f"the files under `defaults` ({', '.join(others)}) are not read: name a complete file")
        del given.options["defaults"]
    return given


def _load(text: str) -> dict[Any, Any]:
    """The YAML document as plain values, as OmegaConf reads it: a key given twice is refused, and so are YAML bombs."""
    try:
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except _UNREADABLE as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"it is not valid YAML: {said}") from None
    if not isinstance(values, dict):
        raise ConfigError("it must contain `key: value` pairs at its top level")
    return values


def _leaves(values: Mapping[Any, Any], above: tuple[str, ...], count: int) -> Iterator[tuple[str, Any]]:
    if len(above) > DEEPEST:
        raise ConfigError(f"it is nested more than {DEEPEST} levels deep")
    for key, value in values.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            for leaf in _leaves(value, path, count):
                count += 1
                yield leaf
        else:
            count += 1
            yield ".".join(path), value
        if count > MOST_OPTIONS:
            raise ConfigError(f"it has more than {MOST_OPTIONS:,} keys")


# Commands


def _from_command(
    text: str,
    known: Collection[str],
    name_of: Callable[[Word], str],
    read: Callable[[Sequence[Word], Given, Collection[str]], None],
) -> Given:
    """The options of the command that gives most of the ``known`` ones."""

    def count(command: Command) -> int:
        return len({name for word in command.words if (name := name_of(word)) in known})

    commands = sorted(read_commands(text), key=count, reverse=True)
    given = Given()
    if not commands or not count(commands[0]):
        return given
    chosen = commands[0]
    # A second command with a few options in common, such as a server's, is no second training.
    if others := [each.line for each in commands[1:] if count(each) * 2 > count(chosen)]:
        lines = ", ".join(map(str, sorted(others)))
        given.notes.append(f"the command on line {chosen.line} is translated; others like it are on lines {lines}")
    read(chosen.words, given, known)
    return given


def _overrides(words: Sequence[Word], given: Given, known: Collection[str]) -> None:
    program = True
    for at, word in enumerate(words):
        name = _override_name(word.text)
        program &= not (name and "." in name and not word.text.startswith("-"))
        match = _OVERRIDE.fullmatch(word.text)
        if word.text in ("--multirun", "-m") and not program:
            given.notes.append(f"`{word.text}` starts one run for each of several values; only single values are read")
        elif program or word.text.startswith("-"):
            given.program += f"{word.text} "
        elif word.unknown and (match is None or match[3] is None):
            given.notes.append(_said(word))
        elif match is None:
            if words[at - 1].text[:1] != "-":
                given.notes.append(f"`{word.text:.60}` is no override of Hydra; it is left out")
        elif match[1] == "~":
            given.notes.append(f"`{word.text:.60}` removes a key, so its default is taken")
        elif match[3] is not None:
            given.give(match[2], Option(match[3], "; ".join(word.unknown)) if word.unknown else parsed(match[3]))


def _override_name(text: str) -> str:
    match = _OVERRIDE.fullmatch(text)
    return match[2] if match is not None and match[3] is not None else ""


def _flags(words: Sequence[Word], given: Given, known: Collection[str]) -> None:
    name, values = "", list[Word]()

    def end() -> None:
        nonlocal values
        # What stands behind an array that another file sets belongs to no flag.
        if unset := [word for word in values if not word.text and word.unknown]:
            given.notes.extend(_said(word) for word in unset)
            values = [word for word in values if word not in unset]
        if not name:
            given.program += " ".join(word.text for word in values) + " "
        elif unknown := [reason for word in values for reason in word.unknown]:
            given.give(name, Option(" ".join(word.text for word in values), "; ".join(dict.fromkeys(unknown))))
        else:
            texts = [parsed(word.text, sweeps=False) for word in values]
            held = [option.unresolved for option in texts if option.unresolved]
            alone = texts[0].value if len(texts) == 1 else [option.value for option in texts]
            given.give(name, Option(alone if values else True, "; ".join(held)))

    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            end()
            flag, equals, value = word.text[2:].partition("=")
            name, values = flag, [Word(value, word.unknown, word.environment)] if equals else []
        elif word.text == "--" or word.text.endswith(".py"):
            # What came before were options of a launcher, of which some count: the number of its processes.
            end()
            given.options = {each: option for each, option in given.options.items() if each in known}
            name, values = "", [word]
        else:
            values.append(word)
    end()


def _flag_name(word: Word) -> str:
    return word.text[2:].partition("=")[0] if word.text.startswith("--") else ""


def _said(word: Word) -> str:
    return "; ".join(word.unknown) + ", so what it adds is not translated"


# Values


def parsed(text: str, sweeps: bool = True) -> Option:
    """A value as Hydra and YAML read it: numbers, true and false, null, quoted text, lists and mappings.

    With `sweeps`, values between commas are those of several runs.
    """
    bare = text.strip()
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"":
        return Option(bare[1:-1])
    if _ENVIRONMENT.sub("", bare).count("${"):
        return (
            Option(bare, "") if _REFERENCE.search(bare) else Option(bare, f"a reference that is not read: {bare:.60}")
        )
    if sweeps and (_SWEEP.match(bare) or _has_comma(bare)):
        return Option(bare, "several values, one run for each (a sweep of Hydra)")
    if bare[:1] in ("[", "{") and bare[-1:] in ("]", "}"):
        try:
            return Option(_load(f"value: {bare}")["value"])
        except ConfigError:
            return Option(bare, "it is no list or mapping that can be read")
    words: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
    if bare.lower() in words:
        return Option(words[bare.lower()])
    if _NUMBER.fullmatch(bare):
        return Option(int(bare) if re.fullmatch(r"[+-]?\d{1,18}", bare) else float(bare))
    return Option(text)


def _has_comma(text: str) -> bool:
    """Whether a comma separates values: one that is not in brackets, quotes or braces."""
    depth, quote = 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in ")}]":
            depth -= 1
        elif char == "," and not depth:
            return True
    return False


def _referenced(option: Option, options: Mapping[str, Option], depth: int) -> Option:
    """The option with references to other options of the file replaced by their values."""
    if option.unresolved or not isinstance(option.value, str) or not _REFERENCE.search(option.value):
        return option
    names = _REFERENCE.findall(option.value)
    missing = [name for name in names if name not in options or options[name].unresolved]
    if missing or depth > DEEPEST:
        return Option(option.value, f"it refers to {', '.join(missing or names)}, which the file does not give")
    values = {name: _referenced(options[name], options, depth + 1) for name in names}
    if bad := [value.unresolved for value in values.values() if value.unresolved]:
        return Option(option.value, bad[0])
    if option.value == f"${{{names[0]}}}":
        return values[names[0]]
    text = _REFERENCE.sub(lambda match: str(values[match[1]].value), option.value)
    return parsed(text) if len(text) <= MOST_BYTES // 100 else Option(option.value, "it grows beyond reason")
