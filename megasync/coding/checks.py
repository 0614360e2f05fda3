"""Reads test code: what it takes from the program, and whether it can fail.

Invariant: a text that no wrong program can fail is refused. `check_of` requires an assertion that runs and a name that
comes from the program.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections import Counter
from collections.abc import Collection, Iterator

from megasync.coding.sandbox import Check
from megasync.coding.sandbox_check import evaluates, is_test
from megasync.errors import DataError

# Names that tests use without an import, by their modules. A task that asks for one of them asks for nothing else.
_IMPORTS = {
    name: f"from {module} import {name}"
    for module, names in {
        "collections": ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
        "contextlib": ("redirect_stdout",),
        "copy": ("deepcopy",),
        "decimal": ("Decimal",),
        "fractions": ("Fraction",),
        "io": ("StringIO",),
        "megasync.coding.sandbox_stand_ins": (
            *("ListNode", "TreeNode", "list_node", "tree_node", "is_same_list", "is_same_tree"),
        ),
        "math": ("inf", "isclose", "nan", "pi"),
        "typing": (
            "Any",
            "Callable",
            "Dict",
            "Iterable",
            "Iterator",
            "List",
            "Optional",
            "Sequence",
            "Set",
            "Tuple",
            "Union",
        ),
    }.items()
    for name in names
}
_MODULES = frozenset(
    {"bisect", "collections", "copy", "datetime", "decimal", "functools", "heapq", "io", "itertools", "json", "math"}
    | {"operator", "os", "pytest", "random", "re", "statistics", "string", "sys", "time", "typing", "unittest"}
)
_IMPORTS |= {name: f"import {name}" for name in _MODULES}
_IMPORTS["np"] = "import numpy as np"
# Under these names tests import the program.
_PROGRAMS = frozenset(
    {"answer", "candidate", "main", "my_module", "program", "solution", "solutions", "submission", "your_module"}
)
# What the stand-ins of the test's sandbox have.
_STAND_INS = {
    "pytest": frozenset({"approx", "fail", "fixture", "main", "mark", "param", "raises"}),
    "numpy": frozenset({"allclose", "float32", "float64", "isclose", "ndarray", "testing"}),
}
_FIXTURES = frozenset({"self", "capsys"})
# What reading a text as JSON or Python may raise, however long or deep it is.
UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_of(text: str, entry: str | None = None, takes: Collection[str] = ()) -> Check:
    """The check that a text makes of a program.

    `entry` is what the tests call `candidate`, such as "add" or "Solution().add". The names that it `takes` come from
    the program also if Python has them. Raises DataError for a text that cannot be run, or that cannot fail.
    """
    try:
        tree = ast.parse(text)
        table = symtable.symtable(text, "<tests>", "exec")
    except UNREADABLE as error:
        raise DataError(f"they are neither JSON nor Python ({error})") from None
    modules = _imported(tree)
    _check_replaced(tree)
    _check_fixtures(tree)
    free = _free(table)
    program_names = {name for name in free if name in takes} | _taken(tree)
    if entry is not None:
        if "candidate" in free:
            text = f"candidate = {entry}\n{text}"
        for name in _uncalled_checks(tree):
            text = f"{text}\n{name}({entry})\n"
        program_names |= _names_of_entry(entry)
        unknown = {n for n in free - program_names - {"candidate"} if n not in _IMPORTS and not hasattr(builtins, n)}
        if unknown:
            raise DataError(
                f"they use {', '.join(sorted(unknown))} without a definition, and only the entry point {entry} comes "
                f"from the program; put the definition into the tests or into test_setup_code"
            )
        free.discard("candidate")
    elif uncalled := _uncalled_checks(tree):
        raise DataError(
            f"nothing calls {uncalled[0]}(candidate); add a column entry_point with the name of the function to test"
        )
    if not any(evaluates(node) for node in _running(tree, entry is not None)):
        raise DataError(
            "no assertion in them runs, so every program would pass; write an assert that calls the program"
        )
    program_names |= {name for name in free if name not in _IMPORTS and not hasattr(builtins, name)}
    if not program_names and not modules:
        # MBPP has tasks that ask for a function with the name of a built-in one.
        program_names = {name for name in free if name in _IMPORTS} or free
        if len(program_names) != 1:
            raise DataError("they use no name of the program; call the function that the task asks for")
    prelude = "\n".join(_IMPORTS[name] for name in sorted(free - program_names) if name in _IMPORTS)
    return Check(text, tuple(sorted(program_names)), prelude, tuple(sorted(modules)))


def _free(table: symtable.SymbolTable) -> set[str]:
    """The global names that a text uses and does not assign."""
    used, assigned = set(), set()
    tables = [table]
    for scope in tables:
        tables.extend(scope.get_children())
        for symbol in scope.get_symbols():
            if scope is not table and not symbol.is_global():
                continue
            if symbol.is_referenced():
                used.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported() or (scope is table and symbol.is_namespace()):
                assigned.add(symbol.get_name())
    return {name for name in used - assigned if not name.startswith("__")}


def _names_of_entry(entry: str) -> set[str]:
    try:
        tree = ast.parse(entry.strip(), mode="eval")
    except UNREADABLE:
        raise DataError(f"the entry point {entry!r:.100} is not the name of a function") from None
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _imported(tree: ast.Module) -> set[str]:
    """The names under which a text imports the program. Raises DataError for a package that the sandbox lacks."""
    programs = set()
    for module, _, _ in _imports(tree):
        top = module.partition(".")[0]
        if top in _PROGRAMS and module == top:
            programs.add(top)
        elif top not in sys.stdlib_module_names and top not in _STAND_INS:
            raise DataError(
                f"they import {module}, which the sandbox does not have; it has the standard library, and imports the "
                f"program as {', '.join(sorted(_PROGRAMS))}"
            )
    aliases = {alias: module for module, name, alias in _imports(tree) if not name} | {
        "np": "numpy",
        "pytest": "pytest",
    }
    used = [(module, name) for module, name, _ in _imports(tree) if name]
    aliases |= {alias: f"{module}.{name}" for module, name, alias in _imports(tree) if name == "mock"}
    used += [(aliases[name], attribute) for name, attribute in _attributes(tree) if name in aliases]
    for module, name in used:
        if name == "patch" and "mock" in module:
            raise DataError(
                "they patch with unittest.mock, but the program runs in another process; pass it what it needs"
            )
        if module == "inspect":
            raise DataError(f"they use inspect.{name}, but the program runs in another process; call what it defines")
        if module in _STAND_INS and name not in _STAND_INS[module]:
            raise DataError(f"they use {module}.{name}; of {module} the sandbox has {sorted(_STAND_INS[module])}")
    return programs


def _taken(tree: ast.Module) -> set[str]:
    """The names that a text takes from the program by importing it."""
    aliases = {alias for module, name, alias in _imports(tree) if module in _PROGRAMS and not name}
    attributes = {attribute for name, attribute in _attributes(tree) if name in aliases}
    return attributes | {name for module, name, _ in _imports(tree) if module in _PROGRAMS and name not in ("", "*")}


def _imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(module, imported name or "", name in the text) of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or ".", alias.name, alias.asname or alias.name) for alias in node.names)


def _attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, attribute) of each attribute of a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def _uncalled_checks(tree: ast.Module) -> list[str]:
    """The functions like HumanEval's `check(candidate)` that a text defines and does not use."""
    used = _names(tree)
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not used[node.name]
        and not node.decorator_list
        and (node.name == "check" or [argument.arg for argument in node.args.args] == ["candidate"])
    ]


def _running(tree: ast.Module, has_entry: bool) -> Iterator[ast.AST]:
    """The nodes of a text that run: not those of functions and classes that nothing which runs uses."""
    checks = _uncalled_checks(tree) if has_entry else []
    idle = [s for s in tree.body if isinstance(s, _DEFINITIONS) and not is_test(s) and s.name not in checks]
    running = [statement for statement in tree.body if statement not in idle]
    for statement in running:  # which grows meanwhile
        names = _names(statement)
        running += [each for each in idle if names[each.name] and each not in running]
        yield from ast.walk(statement)


def _names(tree: ast.AST) -> Counter[str]:
    """How often each name is used."""
    return Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _check_replaced(tree: ast.Module) -> None:
    """Raises DataError for a text that replaces what the program reads, which is in another process."""
    programs = {alias for module, name, alias in _imports(tree) if module in _PROGRAMS and not name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            replaced = f"{node.value.id}.{node.attr}"
            if replaced == "sys.stdin" or node.value.id in {"builtins"} | programs:
                raise DataError(f"they set {replaced}, but the program runs in another process; pass it what it needs")


def _check_fixtures(tree: ast.Module) -> None:
    """Raises DataError for a test function with a parameter that nothing gives a value."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    fixtures = {f.name for f in functions if any("fixture" in ast.unparse(d) for d in f.decorator_list)}
    collected = [node for node in tree.body if is_test(node)]
    methods = [m for node in collected for m in (node.body if isinstance(node, ast.ClassDef) else [node])]
    for test in methods:
        if not (isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test")):
            continue
        decorators = " ".join(ast.unparse(decorator) for decorator in test.decorator_list)
        required = test.args.args[: len(test.args.args) - len(test.args.defaults)]
        for argument in required:
            if argument.arg not in fixtures | _FIXTURES and argument.arg not in decorators:
                raise DataError(f"{test.name} has the parameter {argument.arg}, which is no fixture that they define")
