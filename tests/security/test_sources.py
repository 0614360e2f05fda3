"""Nothing from a network peer is unpickled and no code from a model folder is run: checked in the source itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "megasync").rglob("*.py")), *sorted((ROOT / "patches").rglob("*.py"))]

# Each can run code that its input names.
UNPICKLING = {"loads", "load", "Unpickler"}
PICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "broadcast_pyobj"),
}
# Plain values only; the first one is written in C, where PyYAML was built with it.
SAFE_LOADERS = {"getattr(yaml, 'CSafeLoader', yaml.SafeLoader)", "yaml.SafeLoader"}
# They unpickle what they have just pickled, to see that it can be sent to another process, or as the fastest copy.
OWN = {
    "megasync/config/load.py",
    "megasync/rewards/processes.py",
    "megasync/cluster/rollout_workers.py",
    "megasync/rollout/worker_link.py",
    "megasync/lab/sim/workers.py",
}
# Processes in a sandbox, whose purpose is to run a model's program or a dataset's tests.
SANDBOXED = {
    *(f"megasync/coding/sandbox_{name}.py" for name in ("link", "check")),
    "megasync/sandboxes/guest/inside.py",
}


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        module, _, last = name.rpartition(".")
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if (module in PICKLERS and last in UNPICKLING) or last in OBJECT_COLLECTIVES or name in ("eval", "exec"):
            yield name
        if name in ("torch.load", "np.load", "numpy.load") and (
            keywords.get("weights_only") != "True" and keywords.get("allow_pickle") != "False"
        ):
            yield f"{name} without weights_only=True or allow_pickle=False"
        loader = ast.unparse(node.args[1]) if name == "yaml.load" and len(node.args) > 1 else ""
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") and loader not in SAFE_LOADERS:
            yield name
        if keywords.get("trust_remote_code", "False") != "False":
            yield f"{name}(trust_remote_code={keywords['trust_remote_code']})"


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(data)",
        "torch.load(path)",
        "dist.all_gather_object(out, x)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "yaml.load(text, Loader)",
    ],
)
def test_the_look_finds_what_it_looks_for(line: str) -> None:
    assert list(dangers(ast.parse(line)))


def test_nothing_is_unpickled_and_no_foreign_code_is_run() -> None:
    assert len(FILES) > 100
    found = {str(path.relative_to(ROOT)): list(dangers(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES}
    assert {path: names for path, names in found.items() if names and path not in OWN | SANDBOXED} == {}
