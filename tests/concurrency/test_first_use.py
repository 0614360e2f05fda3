"""No thread is the first to use a type of msgspec."""

from __future__ import annotations

import ast
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


def bases_of(node: ast.ClassDef) -> set[str]:
    return {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}


def test_every_struct_of_the_package_is_prepared() -> None:
    classes = [
        (path, node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    structs = {"Struct"}
    while more := {node.name for _, node in classes if bases_of(node) & structs} - structs:
        structs |= more
    found = [(path, node) for path, node in classes if node.name in structs and bases_of(node) & structs]
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, node in found
        if "prepared" not in {getattr(decorator, "id", "") for decorator in node.decorator_list}
    ]
    assert len(found) > 50 and missing == []


def test_whatever_is_decoded_without_a_decoder_of_its_own_is_a_struct_or_prepared() -> None:
    """The types that calls of msgspec name, all of them in this list, so that each was looked at."""
    named = set()
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                # `invoke(function, ...)` calls the function.
                call, *arguments = node.args if ast.unparse(node.func) == "invoke" else [node.func, *node.args]
                call = ast.unparse(call)
                kinds = {"msgspec.convert": arguments[1:2]}.get(call, [])
                if call in ("msgspec.json.decode", "msgspec.msgpack.decode"):
                    kinds = [keyword.value for keyword in node.keywords if keyword.arg == "type"]
                named |= {(str(path.relative_to(ROOT)), ast.unparse(kind)) for kind in kinds}
    assert named == {
        ("buffer/ledger.py", "BufferStatus"),  # prepared
        ("gateway/chat_request.py", "ChatBody"),
        ("lab/rehearsal/driver.py", "RankReport"),  # prepared
        ("rollout/tools.py", "self._types.get(name, Any)"),  # prepared with the tool
        ("serving/answers.py", "form"),  # of `parse_as`: Structs, and lists of them
        ("serving/engine_blueprint.py", "list[EngineRank]"),
        ("sync/messages.py", "cls"),
        ("sglang/pipeline.py", "_Outcome"),
        ("sglang/pipeline.py", "type(outcome.payload[0])"),  # of SGLang, in one thread of its scheduler
        ("sglang/updates.py", "TraceRequest"),
        ("sync/shared_memory.py", "Handle"),
    }
