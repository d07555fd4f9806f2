"""Options and error handling that all commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from protocol.errors import TandemError

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option(help="Base URL of the server.", envvar="TANDEM_URL")]
ApiKey = Annotated[str | None, typer.Option(help="Bearer token.", envvar="TANDEM_API_KEY")]
ModelTag = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="Local folder or hub id; the same as --model.")
]
ConfigFile = Annotated[str | None, typer.Option(metavar="FILE", help="YAML file of options.")]


def fail(error: Exception | str) -> typer.Exit:
    """Print the error in one line. The caller raises the returned exception."""
    typer.echo(f"tandem: {error}", err=True)
    return typer.Exit(1)


class Commands(TyperGroup):
    """Turns a `TandemError` of a command into one line of output and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TandemError as error:
            raise fail(error) from error


def with_model(flags: dict[str, Any], model_tag: str | None) -> dict[str, Any]:
    """Return the options, with the model that was given as an argument."""
    if model_tag is None:
        return flags
    if flags["model"] is not None:
        raise fail("--model: given twice, as an option and as an argument")
    return flags | {"model": model_tag}
