"""Small faults for a source file: each mutant replaces one expression or one statement."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_TELLS = {"log", "logger", "_log", "_logger", "logging", "warnings"}
_COUNTS = {"inc", "dec", "observe", "labels", "Counter", "Gauge", "Histogram"}
_SHOWS = {"__repr__", "__str__"}
_TEXTS = (ast.JoinedStr, ast.List, ast.Tuple)


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    scope: str
    """The function's `__qualname__`, or an empty string for code that runs on import."""
    operator: str
    before: str
    after: str
    nth: int
    """The mutant's number among those that differ only in their line."""
    start: int
    end: int
    """The range of bytes in the file that `after` replaces."""
    lines: tuple[int, int]
    """The lines that run if the mutated code runs."""

    @property
    def key(self) -> str:
        """Return a name that stays when other lines of the file move."""
        parts = (self.file, self.scope, self.operator, self.before, self.after, str(self.nth))
        return " | ".join(" ".join(part.split()) for part in parts)

    def applied(self, source: bytes) -> bytes:
        """Return the mutated file. It keeps the number of lines, so that other code does not move."""
        lost = source[self.start : self.end].count(b"\n") - self.after.count("\n")
        following = source.find(b"\n", self.end)
        following = len(source) if following < 0 else following
        return (
            source[: self.start] + self.after.encode() + source[self.end : following] + b"\n" * lost
        ) + source[following:]

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.line}: {self.operator}: {before[:70]} -> {after[:70]}"


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    found = _Finder(file, source)
    found.visit(ast.parse(source))
    return [mutant for mutant in found.mutants if _compiles(mutant.applied(source))]


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder(ast.NodeVisitor):
    """Walks through a file, leaving out messages, logs, metrics and types."""

    def __init__(self, file: str, source: bytes) -> None:
        self.mutants: list[Mutant] = []
        self._file = file
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self._in_function = False
        self._lines = (1, 1)
        self._seen: Counter[tuple[str, ...]] = Counter()

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            self._lines = (node.lineno, end or node.lineno)
        super().visit(node)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _add(self, operator: str, node: ast.expr | ast.stmt, after: str) -> None:
        before = self._text(node)
        scope = ".".join(self._names) if self._in_function else ""
        alike = (scope, operator, before, after)
        start, end = self._span(node)
        place = (self._seen[alike], start, end, self._lines)
        self.mutants.append(Mutant(self._file, node.lineno, *alike, *place))
        self._seen[alike] += 1

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _SHOWS:
            return
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._enter(node, is_function=True)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node, is_function=self._in_function)

    def _enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, is_function: bool) -> None:
        outer = self._names, self._in_function
        self._names = [*self._names, *(["<locals>"] if self._in_function else []), node.name]
        self._in_function = is_function
        for statement in node.body:
            self.visit(statement)
        self._names, self._in_function = outer

    def visit_If(self, node: ast.If) -> None:
        if not self._text(node.test).endswith("TYPE_CHECKING"):
            self.visit_While(node)

    def visit_While(self, node: ast.While | ast.If | ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_While  # noqa: N815

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.Constant) and not _is_not(test):
            self._add("negate a condition", test, f"not ({self._text(test)})")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value and _name(node.annotation) != "TypeAlias":
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call) and not _tells(value):
            self._add("drop a call", node, "pass")
            self.visit(value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if _name(node.targets[0]) in ("__all__", "__slots__"):
            return
        kept = isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        if kept and self._in_function and self._names[-1] != "__init__":
            self._add("drop an assignment", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        other = _ARITHMETIC.get(type(node.op))
        if other and not isinstance(node.value, _TEXTS):
            target, value = self._text(node.target), self._text(node.value)
            self._add("swap arithmetic", node, f"{target} {other}= {value}")
        self._add("drop an assignment", node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value in (None, False)):
            return
        self._add("return nothing", node, "return None")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("drop a raise", node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions: they check the code's own assumptions."""

    def visit_Break(self, node: ast.Break) -> None:
        self._add("swap break and continue", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("swap break and continue", node, "break")

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self._text(node.left), self._text(node.comparators[0])
            for other in _COMPARISONS[type(node.ops[0])]:
                self._add("swap a comparison", node, f"{left} {other} {right}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _ARITHMETIC.get(type(node.op))
        sides = (node.left, node.right)
        if other and not any(isinstance(side, _TEXTS) or _is_text(side) for side in sides):
            self._add(
                "swap arithmetic", node, f"({self._text(node.left)} {other} ({self._text(node.right)}))"
            )
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = " or " if isinstance(node.op, ast.And) else " and "
        self._add("swap and and or", node, f"({other.join(f'({self._text(v)})' for v in node.values)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if _is_not(node):
            self._add("drop a not", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("change a constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._add("change a constant", node, str(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip formatted text, which only people read."""

    def visit_Call(self, node: ast.Call) -> None:
        if _tells(node):
            return
        opposite = _OPPOSITES.get(_name(node.func))
        if opposite and isinstance(node.func, ast.Name):
            self._add("swap min and max, any and all", node.func, opposite)
        self.generic_visit(node)


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _tells(call: ast.Call) -> bool:
    """Tell whether a call logs, warns or counts."""
    return _name(call.func) in _COUNTS or bool(_TELLS & set(_chain(call.func)))


def _chain(node: ast.expr) -> Iterator[str]:
    while isinstance(node, ast.Attribute | ast.Call):
        yield _name(node)
        node = node.value if isinstance(node, ast.Attribute) else node.func
    yield _name(node)
