"""Descriptions of fields, and conversion of untrusted mappings to structs. Errors name field and limit."""

from __future__ import annotations

import difflib
import math
import pkgutil
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, inspect

from protocol.errors import ConfigError, InvalidRequestError


def named(name: str, flag: str) -> Any:
    """Import the object that `module:name` names. Raises `ConfigError` that names `flag`."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag}: there is no {name}: {error}") from error


T = TypeVar("T", bound=msgspec.Struct)

MAX_INT = 2**63 - 1
"""The largest integer that databases, the wire and C code can hold."""
MAX_SECONDS = 1e9
"""About 30 years. Timers cannot wait much longer."""
PositiveInt = Annotated[int, Meta(ge=1, le=MAX_INT)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]


def doc(text: str) -> Meta:
    """Return a field's description, as flags' help and `/openapi.json` show it."""
    return Meta(description=text)


def listed(text: str | None) -> tuple[str, ...]:
    """Return the names in a comma-separated option."""
    return tuple(each.strip() for each in (text or "").split(",") if each.strip())


def is_utf8(text: str) -> bool:
    """Return whether messages can hold the text. Other bytes of a command line are surrogates in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def named_texts(value: object, flag: str, example: str) -> dict[str, str]:
    """Return the texts by name in a mapping, in `name=text,...` or a list of such. Raises `ConfigError`."""
    if isinstance(value, Mapping):
        pairs = [(str(name), str(text)) for name, text in value.items()]
    else:
        parts = value if isinstance(value, list | tuple) else listed(str(value))
        split = [str(part).partition("=") for part in parts]
        pairs = [(name.strip(), text.strip()) for name, _, text in split]
        if not all(name and text for name, text in pairs):
            raise ConfigError(f"{flag}: must be {example}, got {value!r}")
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{flag}: {name}: is given twice")
    return dict(pairs)


class FieldError(InvalidRequestError):
    """`field` is invalid, for the reason in `message`."""


def to_struct(fields: Mapping[Any, Any], kind: type[T]) -> T:
    """Convert strictly; None counts as absent. Raises `FieldError` for unknown, missing and bad fields."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in fields.items():
        if name not in known:
            raise FieldError(str(name), _unknown(str(name), list(known)))
        if value is not None:
            _check(name, value, known[name].type)
    present = {name: value for name, value in fields.items() if value is not None}
    for name, field in known.items():
        if field.required and name not in present:
            raise FieldError(name, f"is required: {described(field.type)}")
    return msgspec.convert(present, kind)


def json_object(value: object, flag: str, example: str, kind: str) -> Mapping[Any, Any]:
    """Return the given mapping, or the mapping in a JSON text. Raises `ConfigError` that names `flag`."""
    try:
        fields = msgspec.json.decode(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: must be JSON, as in '{example}': {error}") from error
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{flag}: must be {kind}, got {value!r}")
    return fields


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"is {near[0]} meant?" if near else f"there are {', '.join(known)}"
    return f"there is no such field; {hint}"


def _check(name: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
        is_good = not isinstance(value, float) or math.isfinite(value)
    except msgspec.ValidationError:
        is_good = False
    if not is_good:
        raise FieldError(name, f"must be {described(kind)}, got {value!r}")


def described(kind: Any) -> str:
    """Return a description of valid values of this type, with their limits."""
    return _expected(inspect.type_info(kind))


def _expected(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(type=inner):
            return _expected(inner)
        case inspect.UnionType():
            return " or ".join(_expected(each) for each in kind.types if not _is_none(each))
        case inspect.LiteralType():
            values = ", ".join(repr(value) for value in kind.values)
            return f"one of {values}" if len(kind.values) > 1 else values
        case inspect.IntType():
            return "an integer" + _limits(kind)
        case inspect.FloatType():
            return "a finite number" + _limits(kind)
        case inspect.StrType(pattern=str(pattern)):
            return f"a string that matches {pattern}"
        case inspect.BoolType():
            return "true or false"
        case inspect.ListType(item_type=item):
            return f"a list, each {_expected(item)}"
        case _:
            return "a string"


def _is_none(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.NoneType)


def _limits(kind: inspect.IntType | inspect.FloatType) -> str:
    above, least, most = (None if each is None else _exact(each) for each in (kind.gt, kind.ge, kind.le))
    if above is not None:
        return f" above {above}" + (f", at most {most}" if most is not None else "")
    if least is None:
        return ""
    return f" from {least} to {most}" if most is not None else f" of at least {least}"


def _exact(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"
