"""No thread is the first to use a type of msgspec."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import msgspec._utils
import pytest

import megasync
from megasync.concurrency.first_use import prepared
from megasync.sync import messages

ROOT = Path(megasync.__file__).parent


class Unprepared(msgspec.Struct):
    a: int


@prepared
class Prepared(msgspec.Struct):
    a: int


class Inner(NamedTuple):
    a: int


@prepared
class Outer(msgspec.Struct):
    inner: Inner
    others: list[Prepared]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The classes whose annotations msgspec reads from now on, to build their tables."""
    found: list[type] = []
    read = msgspec._utils._get_class_mro_and_typevar_mappings

    def reading(kind: type) -> object:
        found.append(kind)
        return read(kind)

    monkeypatch.setattr(msgspec._utils, "_get_class_mro_and_typevar_mappings", reading)
    return found


def test_the_first_use_of_a_prepared_type_builds_nothing(built: list[type]) -> None:
    msgspec.convert({"a": 1}, Prepared)
    msgspec.json.decode(b'{"inner": [1], "others": [{"a": 1}]}', type=Outer)
    msgspec.convert([1], Inner)
    assert built == []
    msgspec.convert({"a": 1}, Unprepared)
    assert built == [Unprepared]


def test_no_message_of_a_weight_sync_is_built_when_it_is_parsed(built: list[type]) -> None:
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    for kind in kinds:
        msgspec.json.Decoder(kind)
    assert len(kinds) > 10 and built == []


# A class, by its module and its name.
Place = tuple[str, str]
STRUCT = "msgspec", "Struct"


def classes_of(module: str, nodes: list[ast.AST]) -> Iterator[tuple[ast.ClassDef, set[Place]]]:
    """The classes of a module, with the bases of each."""
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    known = {alias.asname or alias.name: (node.module or "", alias.name) for node in imports for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            names = [ast.unparse(base) for base in node.bases]
            yield node, {STRUCT if name == "msgspec.Struct" else known.get(name, (module, name)) for name in names}


def of_interest(node: ast.AST) -> bool:
    return isinstance(node, (ast.ImportFrom, ast.ClassDef, ast.Call))


def last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def kinds_of(node: ast.AST) -> list[ast.expr]:
    """The type that a call of msgspec without a decoder of its own decodes into."""
    # `invoke(function, ...)` calls the function.
    if not isinstance(node, ast.Call) or last_name(node.func) not in ("decode", "convert", "invoke"):
        return []
    call, *arguments = node.args if ast.unparse(node.func) == "invoke" else [node.func, *node.args]
    if ast.unparse(call) in ("msgspec.json.decode", "msgspec.msgpack.decode"):
        return [keyword.value for keyword in node.keywords if keyword.arg == "type"]
    return arguments[1:2] if ast.unparse(call) == "msgspec.convert" else []


def test_every_struct_of_the_package_and_whatever_else_is_decoded_is_prepared() -> None:
    paths = sorted(ROOT.rglob("*.py"))
    nodes = {path: [*filter(of_interest, ast.walk(ast.parse(path.read_text())))] for path in paths}
    modules = {path: ".".join(("megasync", *path.relative_to(ROOT).with_suffix("").parts)) for path in paths}
    classes = [(path, node, bases) for path in paths for node, bases in classes_of(modules[path], nodes[path])]
    structs = {STRUCT}
    while more := {(modules[path], node.name) for path, node, bases in classes if bases & structs} - structs:
        structs |= more
    kinds = [kind for path in paths for node in nodes[path] for kind in kinds_of(node)]
    decoded = {name.id for kind in kinds for name in ast.walk(kind) if isinstance(name, ast.Name)}
    found = [(path, node) for path, node, bases in classes if bases & structs or node.name in decoded]
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, node in found
        if "prepared" not in {getattr(decorator, "id", "") for decorator in node.decorator_list}
    ]
    assert {"BufferStatus", "RankReport"} <= decoded and len(found) > 50 and missing == []
