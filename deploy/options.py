"""Makes `tandem serve`'s options from the configuration's fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from protocol.config import ServeConfig, field_docs, flag_name


def _metavar(annotation: Any) -> str:
    """Return the placeholder of a value in the help: its choices, or its type."""
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if get_origin(annotation) is Literal:
        return "[" + "|".join(str(argument) for argument in arguments) + "]"
    if arguments:
        return _metavar(arguments[0])
    return {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT")


def _parameter(field: str, annotation: Any, doc: str, default: Any) -> inspect.Parameter:
    flag = flag_name(field)
    shown = f"{doc} (default: {default})" if default is not None else doc
    option: Any
    if annotation is bool:
        option = typer.Option(None, f"{flag}/--no-{flag[2:]}", help=shown, show_default=False)
    else:
        option = typer.Option(None, flag, help=shown, show_default=False, metavar=_metavar(annotation))
    kind: Any = bool | None if annotation is bool else str | None
    if annotation == dict[str, str] | None:  # each use adds one pair
        kind = list[str] | None
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def with_config_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a Typer command one option for each field of `ServeConfig`.

    The command gets them as keyword arguments; None stands for "not given". Values stay text: `load_config`
    checks them for all sources alike, and names the flag.
    """
    hints = get_type_hints(function, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    docs, types = field_docs(), get_type_hints(ServeConfig)
    parameters = own + [_parameter(field, kind, *docs[field]) for field, kind in types.items()]

    def command(**values: Any) -> None:
        function(**values)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
