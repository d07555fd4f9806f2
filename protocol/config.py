"""The one configuration object. `deploy/config.py` fills and checks it."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
    """Return each field's type."""
    return get_type_hints(ServeConfig, include_extras=limits)


def field_docs() -> dict[str, tuple[str, Any]]:
    """Return each field's help text and default, for the command line."""
    hints = field_types(limits=True)
    docs = {}
    for field in fields(ServeConfig):
        texts = [meta.description for meta in hints[field.name].__metadata__ if meta.description]
        docs[field.name] = (texts[0], field.default)
    return docs


def field_groups() -> dict[str, tuple[str, list[str]]]:
    """Return the groups of fields by name, each with its title, in the order of help."""
    groups = {}
    for kind in reversed(ServeConfig.__bases__):
        name = kind.__name__.removesuffix("Options").lower()
        groups[name] = ((kind.__doc__ or "").splitlines()[0], [field.name for field in fields(kind)])
    return groups
