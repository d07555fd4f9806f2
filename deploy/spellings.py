"""Reads vLLM's spelling: turns command lines and entries of a --config file into Tandem's options."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from deploy.vllm_flags import HARMLESS, LISTS, NEEDLESS, REFUSED, RENAMED, SHORT, VALUES
from protocol.config import field_types
from protocol.errors import ConfigError

logger = logging.getLogger("tandem.config")

_OWN = {field.replace("_", "-"): kind for field, kind in field_types().items()}
_BOOLEANS = {"true": True, "false": False}
_FLAG = re.compile(r"--?[A-Za-z]")


def _lines(table: Mapping[str, str]) -> dict[str, str]:
    return {flag.rstrip("=+"): line for line, flags in table.items() for flag in flags.split()}


def _arities() -> Iterator[tuple[str, str]]:
    """Yield each flag with its arity: "" for no value, `=` for one, `=+` for several."""
    for flags in (*NEEDLESS.values(), *REFUSED.values()):
        for flag in flags.split():
            name = flag.rstrip("=+")
            yield name, flag[len(name) :]
    for name, kind in _OWN.items():
        yield name, "" if kind is bool else "=+" if name in (*LISTS, "lora-modules") else "="
    for name in RENAMED:
        yield name, "="


_NEEDLESS, _REFUSED = _lines(NEEDLESS), _lines(REFUSED)
ARITIES = dict(_arities())
"""The arity of each flag of Tandem and of vLLM."""


def rewrite(arguments: Sequence[str], own: Collection[str]) -> list[str]:
    """Return a command line in Tandem's spelling. `own`: the names of the command's options.

    Raises `ConfigError` for unknown flags, with the nearest names, and for flags of vLLM that ask for what
    Tandem does not do.
    """
    options: dict[str, Any] = {}
    rest: list[str] = []
    tokens = deque(arguments)
    while tokens:
        token = tokens.popleft()
        if token == "--":
            rest += [token, *tokens]
            break
        name, text = _name(token)
        positive = name.removeprefix("no-")
        arity = ARITIES.get(positive, ARITIES.get(positive.partition(".")[0]))
        if not name or (arity is None and name in own):
            rest.append(token)
        elif arity is None:
            raise ConfigError(f"--{name}: there is no such option{nearest(name, own)}")
        elif arity and text is None and (not tokens or _FLAG.match(tokens[0])):
            raise ConfigError(f"--{name}: needs a value")
        else:
            add_options(options, name, _value(arity, text, tokens), f"--{name}")
    return [*_arguments(options), *rest]


def add_options(options: dict[str, Any], name: str, value: Any, source: str) -> None:
    """Add the options that one of the flags means. Logs a line for a flag that Tandem does not need.

    Raises `ConfigError` that names the `source`.
    """
    for new, meant in _translated(name, value, source):
        base, _, field = new.partition(".")
        if field and isinstance(options.setdefault(base, {}), dict):
            options[base][field] = meant
        elif isinstance(meant, list):
            options[base] = [*options.get(base, []), *meant]
        else:
            options[base] = meant


def _name(token: str) -> tuple[str, str | None]:
    """Return the flag's name with dashes, and the value after `=`; "" if the token is no flag."""
    if token.startswith("-O"):
        token = "--compilation-config" + (f"={token[2:]}" if token[2:3].isdigit() else token[2:])
    for short, long in SHORT.items():
        if re.match(rf"{short}($|[=.])", token):
            token = f"--{long}{token[len(short) :]}"
    if not token.startswith("--"):
        return "", None
    name, is_given, text = token[2:].partition("=")
    base, dot, field = name.partition(".")
    return base.replace("_", "-") + dot + field, text if is_given else None


def _value(arity: str, text: str | None, tokens: deque[str]) -> Any:
    """Return a flag's value: `text`, or if None, what the next tokens give."""
    if arity == "=+":
        texts = [] if text is None else [text]
        while text is None and tokens and not _FLAG.match(tokens[0]):
            texts.append(tokens.popleft())
        return texts
    if text is None and tokens and (arity or tokens[0].lower() in _BOOLEANS):
        text = tokens.popleft()
    if arity:
        return text
    return True if text is None else _BOOLEANS.get(text.lower(), text)


def _translated(name: str, value: Any, source: str) -> Iterator[tuple[str, Any]]:
    if name.startswith("no-") and name[3:] in ARITIES:
        name, value = name[3:], value is False
    base, _, field = name.partition(".")
    needless = _NEEDLESS.get(name, _NEEDLESS.get(base))
    if needless is not None:
        logger.warning("%s: not needed: %s", source, needless)
    elif base in _REFUSED:
        if value is not False and str(value) not in HARMLESS.get(name, ()):
            raise ConfigError(f"{source}: {_REFUSED[base]}")
    elif name in RENAMED:
        for new in RENAMED[name]:
            yield from _translated(new, value, source)
    elif name == "speculative-config" and (fields := _object(value)):
        for each, content in fields.items():
            yield from _translated(f"{name}.{each}", content, f"{source}: {each}")
    elif name == "kv-events-config" and isinstance(fields := _object(value), Mapping):
        if fields.get("enable_kv_cache_events", True) and fields.get("publisher") != "null":
            ours = {"enable_kv_cache_events": True, "publisher": "zmq"}
            yield name, {each: content for each, content in fields.items() if ours.get(each) != content}
    elif name == "speculative-config.model" and value in ("ngram", "[ngram]"):
        yield "speculative-config.method", "ngram"
    elif name == "lora-modules" and isinstance(value, list):
        yield name, [_adapter(each) for each in value]
    elif name in LISTS and isinstance(value, str | list):
        yield name, ",".join(map(str, _object(value) or ([value] if isinstance(value, str) else value)))
    else:
        meant = _renamed_value(name, _decoded(value) if field else value, source)
        if meant is not None:
            yield name, meant


def _renamed_value(name: str, value: Any, source: str) -> Any:
    for pattern, meant in VALUES.get(name, {}).items():
        if fnmatchcase(str(value), pattern):
            if meant in (None, "auto"):
                logger.warning("%s %s: here it is %s", source, value, meant or "the default")
            return meant
    return value


def _adapter(value: Any) -> Any:
    """Return `name=path` for vLLM's JSON form of an adapter."""
    fields = _object(value)
    is_named = isinstance(fields, Mapping) and {"name", "path"} <= fields.keys()
    return f"{fields['name']}={fields['path']}" if is_named else value


def _object(value: Any) -> Any:
    """Return a mapping or list, given as such or as JSON text; None for any other value."""
    [text] = value if isinstance(value, list) and len(value) == 1 else [value]
    found = _decoded(text)
    return found if isinstance(found, Mapping | list) else None


def _decoded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _arguments(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list):
            yield from (f"--{name}={each}" for each in value)
        else:
            yield f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}"


def nearest(name: str, own: Collection[str] = ()) -> str:
    """Return a question that names the nearest flags, or "" if none is near."""
    near = difflib.get_close_matches(name, {*own, *ARITIES}, 2, 0.75)
    return f"; is {' or '.join(f'--{each}' for each in near)} meant?" if near else ""
