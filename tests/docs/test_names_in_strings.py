"""Names that tests write in strings exist: what they patch, modules that they start, parts of modules.

No type check reads strings, and the tests that use them may be expensive.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"tests", "examples"}
REFUSED = {"router.placement.rules.rule"}
"""Names that a test gives since they do not exist."""
PART = re.compile(r"([a-z_]\w*(?:\.\w+)+):(\w+)")


def test_names_in_strings_exist() -> None:
    found = {path: list(named(ast.parse(path.read_text()))) for path in (ROOT / "tests").rglob("*.py")}
    ours = [(path, name) for path, names in found.items() for name in names if name.split(".")[0] in PACKAGES]
    assert len(ours) > 200
    absent = [f"{path.relative_to(ROOT)}: {name}" for path, name in ours if not exists(name)]
    assert [each for each in absent if each.split(": ")[1] not in REFUSED] == []


def test_a_name_that_is_no_more_is_found() -> None:
    for source, absent in (
        ('from router.dispatch import races\nmonkeypatch.setattr(races, "ABSENT", 1)', True),
        ('from router.dispatch import races\nmonkeypatch.setattr(races, "ASK_AFTER_S", 1)', False),
        ('monkeypatch.setattr("router.dispatch.absent.ASK_AFTER_S", 1)', True),
        ('from kvtransfer.lease import LeaseTable\nmock.patch.object(LeaseTable, "absent")', True),
        ('start([sys.executable, "-m", "tests.engine.absent"])', True),
        ('start("kvtransfer.lease:Absent")', True),
        ('start("kvtransfer.lease:LeaseTable")', False),
    ):
        assert [not exists(name) for name in named(ast.parse(source))] == [absent], source


def named(tree: ast.Module) -> Iterator[str]:
    """Yield the whole names of what is patched or named by strings."""
    nodes = [*ast.walk(tree)]
    imported = dict(_imported(nodes))
    for node in nodes:
        match node:
            case ast.Constant(str(text)) if part := PART.fullmatch(text):
                yield f"{part[1]}.{part[2]}"
            case ast.List(parts):
                yield from (
                    module.value
                    for option, module in itertools.pairwise(parts)
                    if isinstance(module, ast.Constant) and ast.unparse(option) == "'-m'"
                )
            case ast.Call(ast.Attribute(attr="setattr" | "patch"), [ast.Constant(str(name)), *_]):
                yield name
            case ast.Call(ast.Attribute(attr="setattr" | "object"), [target, ast.Constant(str(name)), *_]):
                first, *others = ast.unparse(target).split(".")
                if first in imported:
                    yield ".".join([imported[first], *others, name])


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each imported name, and the whole name that it stands for."""
    for node in nodes:
        match node:
            case ast.Import(names):
                yield from ((each.asname, each.name) for each in names if each.asname)
                yield from ((each.name.split(".")[0],) * 2 for each in names if not each.asname)
            case ast.ImportFrom(str(module), names):
                yield from ((each.asname or each.name, f"{module}.{each.name}") for each in names)


def exists(name: str) -> bool:
    """Tell whether a module has the name, and a class its member. Inherited members are not judged."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        if (members := _bound("/".join(words[:end]))) is not None:
            return end == len(words) or _is_member(members, words[end:])
    return False


def _is_member(members: dict[str, ast.AST], words: list[str]) -> bool:
    node = members.get(words[0])
    if len(words) == 1 or not isinstance(node, ast.ClassDef) or node.bases:
        return node is not None
    own = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return words[1] in own | _names(node).keys()


@functools.cache
def _bound(path: str) -> dict[str, ast.AST] | None:
    """Return what the module or package of this path binds, or None if there is none."""
    for file in (ROOT / f"{path}.py", ROOT / path / "__init__.py"):
        if file.exists():
            return _names(ast.parse(file.read_text()))
    return {} if (ROOT / path).is_dir() else None


def _names(scope: ast.AST) -> dict[str, ast.AST]:
    """Return what is bound in a module or class, outside of its functions and classes."""
    found: dict[str, ast.AST] = {}
    left = [*ast.iter_child_nodes(scope)]
    while left:
        match left.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() as node:
                found[node.name] = node
            case ast.Import(names) | ast.ImportFrom(_, names) as node:
                found |= {each.asname or each.name.split(".")[0]: node for each in names}
            case ast.Name(str(name), ast.Store()) as node:
                found[name] = node
            case node:
                left += ast.iter_child_nodes(node)
    return found
