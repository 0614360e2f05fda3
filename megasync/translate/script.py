"""Reads the arguments of trainers and their configurations in a Python script, which is parsed and never imported.

Invariant: a value is read only from what its expression says: literals, names that the file assigns exactly once,
outside of any condition and loop, arithmetic and f-strings of those, and defaults of the script's own `argparse`
arguments. `_Values` guarantees it; anything else is a reason why there is no value.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megasync.errors import ConfigError

# Trainers and configurations whose arguments are options, by the names of the classes.
_CONFIGS = ("GRPOConfig", "AsyncGRPOConfig", "SFTConfig", "RLOOConfig", "ModelConfig", "ScriptArguments")
_TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer", "SFTTrainer", "RLOOTrainer")
# Arguments of a trainer that are no options: objects of the script.
_OBJECTS = ("args", "processing_class", "train_dataset", "eval_dataset", "callbacks", "peft_config", "data_collator")
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
_DATASET = ("dataset_name", "dataset_config")
# What stands in place of a data set's name where `data_files` names files.
_BUILDERS = ("json", "parquet")
# Other classes of the library, whose training has no counterpart here.
OTHERS = (
    "DPOConfig",
    "KTOConfig",
    "RewardConfig",
    "PPOConfig",
    "OnlineDPOConfig",
    "ORPOConfig",
    "CPOConfig",
    "GKDConfig",
)
LONGEST = 100_000


@dataclass
class Script:
    """The arguments by name: each a value, or "" and why it has none."""

    arguments: dict[str, tuple[Any, str]] = field(default_factory=dict[str, tuple[Any, str]])
    classes: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


class _Unknown(Exception):
    """Why an expression has no value."""


def read_script(text: str) -> Script:
    """The arguments that a script passes. Raises ConfigError for what Python does not parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(f"{line}Python does not parse it: {getattr(error, 'msg', None) or error}") from None
    try:
        return _read(tree)
    except RecursionError:
        raise ConfigError("its expressions are nested too deeply; write them as several statements") from None


def _read(tree: ast.Module) -> Script:
    values, script = _Values(tree), Script()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    instances: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if _called(node.value) in _CONFIGS:
                instances |= {each.id for each in node.targets if isinstance(each, ast.Name)}
            if _called(node.value) in ("parse_args_and_config", "parse_args_into_dataclasses"):
                names = [name for each in node.targets for name in ast.walk(each) if isinstance(name, ast.Name)]
                instances |= {name.id for name in names if name.id.startswith(("training", "model", "script"))}
                script.notes.append(
                    "the script takes options from its command line, which are not in it: translate the shell script "
                    "or YAML file that has them"
                )
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = _called(call)
        if name in _CONFIGS or name in _TRAINERS:
            script.classes.append(name)
            _arguments(call, values, script, lambda key: key, skipped=_OBJECTS if name in _TRAINERS else ())
        elif name == "LoraConfig":
            script.arguments["use_peft"] = (True, "")
            _arguments(call, values, script, lambda key: _LORA.get(key, key if "lora" in key else f"lora_{key}"))
        elif name == "load_dataset":
            _dataset(call, values, script)
        elif name in OTHERS:
            script.classes.append(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id in instances
            ):
                script.arguments[target.attr] = values.of(node.value, functions=False)
    _parsed_classes(tree, script)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "map"
            and node.args
        ):
            said = (
                f"the rows are changed by `{ast.unparse(node.args[0])[:60]}` (line {node.lineno}), which is not run: "
            )
            script.notes.append(said + "write the changed rows to a file, or say data.columns and data.prompt.template")
            break
    return script


def _parsed_classes(tree: ast.Module, script: Script) -> None:
    """Adds classes that are parsed from a command line: their names stand in the file, their values do not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) in ("TrlParser", "HfArgumentParser"):
            names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
            script.classes += [name for name in names if name in _CONFIGS + OTHERS]


def _called(call: ast.Call) -> str:
    node = call.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _arguments(
    call: ast.Call, values: _Values, script: Script, renamed: Callable[[str], str], skipped: tuple[str, ...] = ()
) -> None:
    for keyword in call.keywords:
        if keyword.arg is None:
            script.notes.append(f"`**{ast.unparse(keyword.value)[:60]}` (line {call.lineno}) is not read")
        elif keyword.arg not in skipped:
            script.arguments[renamed(keyword.arg)] = values.of(keyword.value, functions=True)


def _dataset(call: ast.Call, values: _Values, script: Script) -> None:
    """The first data set is the training set; a second one with another name, or another split, the held-out one."""
    found = dict(zip(_DATASET, (values.of(arg) for arg in call.args), strict=False))
    found |= {
        key: values.of(keyword.value)
        for keyword in call.keywords
        for key in [
            {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}.get(keyword.arg or "")
        ]
        if key is not None
    }
    split = found.get("dataset_train_split", ("train", ""))
    files = next((values.of(keyword.value) for keyword in call.keywords if keyword.arg == "data_files"), None)
    if files is not None and found.get("dataset_name", ("", ""))[0] in _BUILDERS:
        file = files[0].get(split[0]) if isinstance(files[0], dict) else files[0]
        found = {"dataset_name": (file, files[1])}
    if "dataset_name" not in script.arguments:
        if isinstance(split[0], list):
            found["dataset_train_split"] = (split[0][0], "")
            found |= {"dataset_test_split": (split[0][1], "")} if len(split[0]) == 2 else {}
        script.arguments |= found
    elif found.get("dataset_name") == script.arguments["dataset_name"] and "dataset_test_split" not in script.arguments:
        script.arguments["dataset_test_split"] = split
    else:
        script.notes.append(f"the data set on line {call.lineno} is not translated; the first one is")


class _Values:
    """The values of expressions, as far as the file alone says them."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: dict[str, ast.expr | str] = {}
        self._functions = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self._imported: dict[str, str] = {}
        self._parsed: set[str] = set()
        self._options: dict[str, ast.expr] = {}
        for node, certain in _statements(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self._imported |= {each.asname or each.name: f"{node.module}:{each.name}" for each in node.names}
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if isinstance(node.value, ast.Call) and _called(node.value) == "parse_args":
                    self._parsed.add(name)
                once = certain and name not in self._names
                self._names[name] = node.value if once else f"{name} is assigned more than once, or on a condition"
            else:
                for each in ast.walk(node) if isinstance(node, ast.Assign | ast.AugAssign | ast.For | ast.With) else ():
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        self._names[each.id] = f"{each.id} is not assigned a value of its own"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) == "add_argument" and node.args:
                flag = node.args[-1]
                default = next((each.value for each in node.keywords if each.arg == "default"), None)
                if isinstance(flag, ast.Constant) and isinstance(flag.value, str) and default is not None:
                    self._options[flag.value.lstrip("-").replace("-", "_")] = default

    def of(self, node: ast.expr, functions: bool = True) -> tuple[Any, str]:
        """The value of an expression, or its text and why it has none."""
        try:
            value = self._of(node, functions, ())
            if len(str(value)) > LONGEST:
                raise _Unknown(f"it is longer than {LONGEST:,} characters")
            return value, ""
        except _Unknown as error:
            return ast.unparse(node)[:200], str(error)

    def _of(self, node: ast.expr, functions: bool, within: tuple[str, ...]) -> Any:
        def of(inner: ast.expr) -> Any:
            return self._of(inner, functions, within)

        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [of(each) for each in node.elts]
            case ast.Dict():
                return {str(of(key)): of(value) for key, value in zip(node.keys, node.values, strict=True) if key}
            case ast.Call() if _called(node) == "dict" and not node.args:
                return {each.arg: of(each.value) for each in node.keywords if each.arg}
            case ast.UnaryOp(op=ast.USub()):
                return -self._number(of(node.operand))
            case ast.BinOp():
                return self._computed(node.op, of(node.left), of(node.right))
            case ast.JoinedStr():
                parts = [of(each.value) if isinstance(each, ast.FormattedValue) else of(each) for each in node.values]
                if any(
                    isinstance(each, ast.FormattedValue) and (each.format_spec or each.conversion > 0)
                    for each in node.values
                ):
                    raise _Unknown("it formats values")
                return "".join(map(str, parts))
            case ast.Name():
                return self._named(node.id, functions, within)
            case ast.Attribute(value=ast.Name(id=name)):
                if name == "torch":
                    return node.attr
                if name in self._parsed and node.attr in self._options:
                    return of(self._options[node.attr])
        raise _Unknown(f"`{ast.unparse(node)[:60]}` is known only when the script runs")

    def _named(self, name: str, functions: bool, within: tuple[str, ...]) -> Any:
        if functions and name in self._functions:
            return f"script:{name}"
        if functions and name in self._imported:
            return self._imported[name]
        value = self._names.get(name)
        if value is None or name in within:
            raise _Unknown(f"`{name}` is known only when the script runs")
        if isinstance(value, str):
            raise _Unknown(value)
        return self._of(value, functions, (*within, name))

    def _computed(self, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(op, ast.Add) and isinstance(left, str) and isinstance(right, str):
            return left + right
        one, other = self._number(left), self._number(right)
        try:
            match op:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case ast.Div():
                    return one / other
                case ast.FloorDiv():
                    return one // other
        except (ArithmeticError, ValueError):
            pass
        raise _Unknown("it is arithmetic that is not read")

    def _number(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e18:
            raise _Unknown(f"{value!r:.60} is no number to compute with")
        return value


def _statements(tree: ast.AST, certain: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, with whether it runs exactly once if its function does."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node, certain
        main = isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'"
        unsure = isinstance(node, ast.If | ast.For | ast.While | ast.Try) and not main
        yield from _statements(node, certain and not unsure)
