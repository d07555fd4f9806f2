"""Conversion of JSON schemas to grammars.

llguidance computes with doubles and 64-bit integers, compares property names as they are spelled, and accepts
29 February in any year. A schema whose grammar would accept too much is narrowed or refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from protocol.errors import InvalidRequestError
from router.parsing.parameters import pointed

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The separators of Python's `json.dumps`, so that most of the white space is determined."""
_DATA = ("default", "examples", "const", "enum")
"""Keywords whose values are data, not schemas."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_APPLICATORS = ("allOf", "anyOf", "oneOf", "$ref")

_BOUNDS = (
    ("minimum", 1, "maximum"),
    ("exclusiveMinimum", 1, "maximum"),
    ("maximum", -1, "minimum"),
    ("exclusiveMaximum", -1, "minimum"),
)
"""Each bound with its direction and the opposite bound."""

_EXACT = 2**53
"""Largest integer up to which doubles represent all integers."""
_LARGEST = 922_337_203_685_477 * 10**4
"""Largest bound: it, its double and the digits that llguidance derives from it are below 2**63."""
_FAR = 10**18
_GRAIN = 10**4
"""Distance wider than the gaps between doubles below 2**63."""
_SMALLEST = 1e-30
_MAX_MULTIPLE = 2**32 // 10
"""Largest divisor: llguidance computes remainders of ten times this number in 32 bits."""
_LONG_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Matches characters that JSON can only write as `\\u` escapes."""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR})"
FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
"""Patterns that replace llguidance's, which accept 29 February in any year and leap seconds."""


def schema_grammar(
    schema: Mapping[str, Any], field: str, *, lenient: bool = False, whitespace_pattern: str | None = None
) -> str:
    """Return a grammar for JSON that satisfies the schema.

    Raises `InvalidRequestError` for a keyword that cannot be enforced; a lenient grammar ignores it.
    """
    spaces = _SPACES if whitespace_pattern is None else {"whitespace_pattern": whitespace_pattern}
    narrow = narrow_schema(schema, field, {**spaces, "lenient": lenient})
    return json.dumps({"grammars": [{"json_schema": narrow}]}, ensure_ascii=False)


def narrow_schema(schema: Mapping[str, Any], field: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a narrower schema that llguidance enforces exactly, with llguidance's options."""
    check_references(schema, field)
    try:
        narrowed = _Narrowed(schema, field, bool(options.get("lenient")))
    except RecursionError as error:
        raise InvalidRequestError(field, str(error)) from error
    own = narrowed.schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise InvalidRequestError(field, "x-guidance: must be an object")
    escapes = {"json_allowed_escapes": 'nrbtf\\"'} if narrowed.one_spelling else {}
    narrowed.schema["x-guidance"] = {**own, **options, **escapes}
    return narrowed.schema


def check_references(schema: Mapping[str, Any], field: str) -> None:
    """Raise `InvalidRequestError` for a part of a schema that only refers to itself."""
    finite: set[int] = set()

    def is_endless(node: Any, above: tuple[int, ...] = ()) -> bool:
        """Return whether the node refers to itself, directly or through other nodes."""
        if not isinstance(node, dict) or id(node) in finite:
            return False
        if id(node) in above:
            return True
        reference, parts = node.get("$ref"), node.get("allOf")
        same = [*parts] if isinstance(parts, list) else []
        if isinstance(reference, str):
            same.append(pointed(reference, schema))
        if any(is_endless(each, (*above, id(node))) for each in same):
            return True
        finite.add(id(node))
        return False

    def check(node: Any, path: str) -> None:
        if isinstance(node, dict) and is_endless(node):
            key = "$ref" if "$ref" in node else "allOf"
            raise InvalidRequestError(field, f"{path}{key}: leads back to itself")
        members: Iterable[tuple[Any, Any]] = node.items() if isinstance(node, dict) else enumerate(node)
        for key, each in members:
            if isinstance(each, (dict, list)) and key not in _DATA:
                check(each, f"{path}{key}.")

    try:
        check(schema, "")
    except RecursionError as error:
        raise InvalidRequestError(field, str(error)) from error


class _Narrowed:
    """A schema that llguidance enforces exactly.

    With `one_spelling` no string may contain a `\\u` escape. Otherwise an additional property could spell a
    name of the schema differently and so evade that property's schema.
    """

    def __init__(self, schema: Mapping[str, Any], field: str, lenient: bool) -> None:
        self._field = field
        self._lenient = lenient
        self._combines = False
        self._compares_names = False
        self._multiples: list[tuple[dict[str, Any], str, int, int]] = []
        self._spelled_with_u = ""
        self.schema: dict[str, Any] = self._schema(schema, "")
        self._check_multiples()
        self.one_spelling = self._compares_names and not lenient
        if self.one_spelling and self._spelled_with_u:
            reason = "a control character cannot be written beside properties of any name"
            raise InvalidRequestError(field, f"{self._spelled_with_u}: {reason} (additionalProperties)")

    def _schema(self, node: Any, path: str) -> Any:
        if isinstance(node, list):
            return [self._schema(each, f"{path}{index}.") for index, each in enumerate(node)]
        if not isinstance(node, dict):
            return node
        narrowed = {}
        for key, value in node.items():
            below = f"{path}{key}."
            if key in _BY_NAME and isinstance(value, dict):
                value = {name: self._schema(each, f"{below}{name}.") for name, each in value.items()}
                if key == "patternProperties":
                    value = {from_ecma(pattern): each for pattern, each in value.items()}
            elif key not in _DATA:
                value = self._schema(value, below)
            narrowed[key] = value
        self._combines |= any(key in narrowed for key in _APPLICATORS)
        self._narrow_constants(narrowed, path)
        self._narrow_bounds(narrowed, path)
        self._narrow_multiple(narrowed, path)
        self._narrow_names(narrowed, path)
        if isinstance(pattern := narrowed.get("pattern"), str):
            narrowed["pattern"] = from_ecma(pattern)
            if ends_in_escape(pattern):
                self._cannot(narrowed, "pattern", path, "ends within an escape")
        _narrow_format(narrowed)
        return narrowed

    def _cannot(self, node: dict[str, Any], key: str, path: str, reason: str) -> None:
        if not self._lenient:
            raise InvalidRequestError(self._field, f"{path}{key}: {reason}")
        del node[key]

    def _narrow_constants(self, node: dict[str, Any], path: str) -> None:
        for key in ("const", "enum"):
            for leaf in _leaves(node.get(key)):
                if isinstance(leaf, str):
                    if _LONG_ESCAPE.search(leaf):
                        self._spelled_with_u = self._spelled_with_u or path + key
                elif not _is_exact(leaf):
                    self._cannot(node, key, path, f"{leaf} has too many digits to be kept to exactly")
                    break

    def _narrow_bounds(self, node: dict[str, Any], path: str) -> None:
        """Narrow the bounds. llguidance needs both bounds if one of them is far from 0."""
        needed = {}
        for key, sign, other in _BOUNDS:
            value = node.get(key)
            if not _is_number(value):
                continue
            least = sign * value
            if 0 < least < _SMALLEST:
                least = _SMALLEST
                node[key] = sign * least
            if abs(least) < _EXACT:
                while sign * _as_read(node[key]) < least:
                    node[key] = math.nextafter(node[key], sign * math.inf)
                continue
            least = max(-_LARGEST, (int(least) // _GRAIN + 2) * _GRAIN)
            if least > _LARGEST:
                self._cannot(node, key, path, f"no number past {value} can be kept to exactly")
                continue
            node[key] = sign * least
            if least >= _FAR:
                needed[other] = sign * _LARGEST
        for key, value in needed.items():
            node.setdefault(key, value)

    def _narrow_multiple(self, node: dict[str, Any], path: str) -> None:
        value = node.get("multipleOf")
        if not _is_number(value):
            return
        digits, places = abs(_as_read(value)), 0
        while digits % 1:
            digits, places = digits * 10, places + 1
        if 0 < digits <= _MAX_MULTIPLE:
            self._multiples.append((node, path, int(digits), places))
        else:
            self._cannot(node, "multipleOf", path, f"{value} has too many digits to be kept to exactly")

    def _check_multiples(self) -> None:
        """Refuse divisors that overflow: where several apply, llguidance multiplies them in 32 bits."""
        found = {(digits, places) for _, _, digits, places in self._multiples}
        most = max((places for _, places in found), default=0)
        product = math.prod(digits * 10 ** (most - places) for digits, places in found)
        if self._combines and len(found) > 1 and product > _MAX_MULTIPLE:
            for node, path, _, _ in self._multiples:
                self._cannot(node, "multipleOf", path, "cannot be kept to together with the others")

    def _narrow_names(self, node: dict[str, Any], path: str) -> None:
        patterns, required = node.get("patternProperties"), node.get("required") or ()
        if not patterns and node.get("additionalProperties") is False:
            return
        self._compares_names |= bool(patterns or required or node.get("properties"))
        least = node.get("minProperties")
        if isinstance(least, int) and isinstance(required, (list, tuple)):
            most = len(set(map(str, required))) + 1
            if least > most:
                reason = f"at most {most}, one more than are required, as further names may be equal"
                self._cannot(node, "minProperties", path, f"{reason}, got {least}")


def _narrow_format(node: dict[str, Any]) -> None:
    wanted = node.get("format")
    pattern = FORMATS.get(wanted) if isinstance(wanted, str) else None
    if pattern is None:
        return
    del node["format"]
    if "pattern" not in node:
        node["pattern"] = pattern
    else:
        node["allOf"] = [*node.get("allOf", ()), {"pattern": pattern}]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the numbers and strings in a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif _is_number(value) or isinstance(value, str):
        yield value


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(number: int | float) -> bool:
    """Return whether llguidance keeps the number, which it reads as a double, then as a 64-bit integer."""
    if abs(number) <= _EXACT or isinstance(number, float):
        return abs(number) <= _EXACT and _as_read(number) == number
    return abs(number) < 2**63 and min(int(float(number)), 2**63 - 1) == number


def _as_read(number: int | float) -> int | float:
    """Return the double that llguidance reads from the number's text; its JSON parser rounds twice."""
    if isinstance(number, int):
        return number
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    read = float("".join(map(str, digits)))
    while exponent < -308:
        read, exponent = read / 1e308, exponent + 308
    read = read / float(f"1e{-exponent}") if exponent < 0 else read * float(f"1e{exponent}")
    return -read if sign else read


_ITEM = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|U[0-9a-fA-F]{8}|[pP]\{[^}]*\}|c[A-Za-z]|.)|.",
    re.DOTALL,
)
_CLASS_ESCAPE = re.compile(r"\\[dDwWsSpP]")
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]?", re.DOTALL)
"""An escape or a class. An unclosed class extends to the end, or each bracket would be searched again."""


def ends_in_escape(pattern: str) -> bool:
    """Return whether the pattern ends within an escape, whose backslash llguidance would drop."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def class_of(body: str, spelled: Callable[[str], str]) -> str:
    """Return the text of a class between its brackets. A hyphen between single characters makes a range."""
    items = [match[0] for match in _ITEM.finditer(body)]
    pieces, at = [], 0
    while at < len(items):
        ends = items[at : at + 3]
        is_range = len(ends) == 3 and ends[1] == "-" and not any(map(_CLASS_ESCAPE.match, ends))
        pieces.append(f"{spelled(ends[0])}-{spelled(ends[2])}" if is_range else spelled(ends[0]))
        at += 3 if is_range else 1
    return "".join(pieces)


def from_ecma(pattern: str) -> str:
    """Return a JSON schema's pattern with its classes rewritten to mean the same to llguidance."""
    return _ESCAPE_OR_CLASS.sub(_respelled_class, pattern)


def _respelled_class(part: re.Match[str]) -> str:
    text = part[0]
    if text[0] != "[" or not text.endswith("]"):
        return text
    negation = "^" if text[1] == "^" else ""
    body = text[1 + len(negation) : -1]
    if not body:
        return "[\\s\\S]" if negation else "[^\\s\\S]"
    return f"[{negation}{class_of(body, _escaped)}]"


def _escaped(item: str) -> str:
    return "\\" + item if item in "[&~-^" else item
