"""Product code never reads bytes that may run code: it uses no pickle and no library call that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = (
    *("protocol", "messaging", "native", "costs", "engine", "speculation", "kvtransfer", "worker"),
    "prefill_worker",
    *("decode_worker", "draft_worker", "router", "planner", "deploy", "models", "training", "quantization"),
)
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "multiprocessing",
}
CALLS = {
    *("send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"),  # ZeroMQ
    *("get_serialized_descs", "deserialize_descs"),  # NIXL
    *(
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
    ),  # torch.distributed
    *("send_object_list", "recv_object_list"),
    *("eval", "exec", "full_load", "unsafe_load"),
}
ALLOWED = {
    "speculation/checkpoint.py: import pickle",  # for the exception of torch's restricted unpickler
    "planner/scenarios.py: from multiprocessing import",  # simulations, over pipes to its own processes
}


def suspects(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (f"import {each.name}" for each in names if each.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield f"from {module} import"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in CALLS:
                if not (isinstance(node.func, ast.Attribute) and name in ("eval", "exec")):
                    yield f"{name}()"
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch")), keywords=keywords):
                if not any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in keywords):
                    yield "torch.load() without weights_only=True"
            case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
                yield "allow_pickle"


def test_the_product_uses_no_pickle() -> None:
    files = [file for package in PRODUCT for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 200
    found = {
        f"{file.relative_to(ROOT)}: {suspect}"
        for file in files
        for suspect in suspects(ast.parse(file.read_text()))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, cloudpickle as cp",
        "from multiprocessing.connection import Listener",
        "def f(s):\n    return s.recv_pyobj()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(file, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_each_way_to_unpickle_is_found(line: str) -> None:
    assert list(suspects(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["torch.load(path, weights_only=True)", "model.eval()", "msgspec.msgpack.decode(raw)"]
)
def test_harmless_code_passes(line: str) -> None:
    assert not list(suspects(ast.parse(line)))
