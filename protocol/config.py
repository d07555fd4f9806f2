"""The one configuration object. `deploy/config.py` fills and checks it."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, get_type_hints

from protocol.engine_options import BatchOptions, MemoryOptions, ModelOptions, SpeculationOptions
from protocol.server_options import ApiOptions, TransferOptions, WorkerOptions


@dataclass(frozen=True, kw_only=True)
class ServeConfig(
    TransferOptions, SpeculationOptions, BatchOptions, MemoryOptions, WorkerOptions, ApiOptions, ModelOptions
):
    """All options of `tandem serve`. A field `max_model_len` is the flag `--max-model-len`.

    The groups are dataclasses because msgspec's structs cannot have several bases with fields. Help lists the
    last group first.
    """


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def field_types(*, limits: bool = False) -> dict[str, Any]:
    return get_type_hints(ServeConfig, include_extras=limits)


def field_docs() -> dict[str, tuple[str, Any]]:
    """Return each field's help text, which is the docstring after it, and its default."""
    texts: dict[str, str] = {}
    for kind in ServeConfig.__mro__[1:-1]:
        for group in ast.parse(inspect.getsource(kind)).body:
            for field, text in pairwise(group.body if isinstance(group, ast.ClassDef) else ()):
                match field, text:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                        texts[name] = " ".join(words.split())
    return {field.name: (texts[field.name], field.default) for field in fields(ServeConfig)}


def field_groups() -> dict[str, tuple[str, list[str]]]:
    """Return the groups of fields by name, each with its title, in the order of help."""
    groups = {}
    for kind in reversed(ServeConfig.__bases__):
        name = kind.__name__.removesuffix("Options").lower()
        groups[name] = ((kind.__doc__ or "").splitlines()[0], [field.name for field in fields(kind)])
    return groups
