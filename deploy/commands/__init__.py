"""Options and error handling that all commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

import typer
from typer.core import TyperCommand, TyperGroup

from protocol.errors import ConfigError, TandemError
from protocol.fields import is_utf8

# Typer brings a copy of Click's class, without a public name.
_UsageError: type[Exception] = cast(Any, typer.BadParameter).__bases__[0]

DEFAULT_URL = "http://127.0.0.1:8000"


def _checked_url(url: str) -> str:
    try:
        is_good = _is_url(url)
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"--url: must be like {DEFAULT_URL}, got {url!r}")
    return url


def _is_url(url: str) -> bool:
    """Return whether HTTP clients can use the URL. Raises ValueError, too, if it is none."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not host.isascii():
        from httpx import URL, InvalidURL  # takes fewer such names than Python's encoding

        try:
            URL(url)
        except InvalidURL:
            return False
    return parts.scheme in ("http", "https") and bool(host.encode("idna")) and parts.port != 0


Url = Annotated[str, typer.Option(help="Base URL of the server.", envvar="TANDEM_URL", callback=_checked_url)]
ApiKey = Annotated[str | None, typer.Option(help="Bearer token.", envvar="TANDEM_API_KEY")]
ModelTag = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Local folder or hub id; the same as --model.")
]
ConfigFile = Annotated[str | None, typer.Option(metavar="FILE", help="YAML file of options.")]


def fail(error: Exception | str) -> typer.Exit:
    """Print the error in one line. The caller raises the returned exception."""
    typer.echo(f"tandem: {error}", err=True)
    return typer.Exit(getattr(error, "exit_status", 1))


class Commands(TyperGroup):
    """A command group that prints a command's error in one line. Exit status: 2 for wrong options, else 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TandemError as error:
            raise fail(error) from error
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            raise fail(ConfigError(_one_line(error))) from error
        except BrokenPipeError:
            raise  # whoever read the output has seen enough
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            raise fail(f"{where}{error.strerror or error}") from error


class HomeCommand(TyperCommand):
    """A command that finds paths from the home folder, which no shell expands after an equals sign."""

    def invoke(self, ctx: Any) -> Any:
        for name, value in ctx.params.items():
            if isinstance(value, Path) and str(value).startswith("~/"):
                ctx.params[name] = value.expanduser()
        return super().invoke(ctx)


class Command(HomeCommand):
    """A command that refuses `nan` and `inf` as numbers, which a lower limit alone lets pass, and texts that
    are not UTF-8, which no message can hold.
    """

    def invoke(self, ctx: Any) -> Any:
        for option in self.params:
            value = ctx.params.get(option.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{option.opts[0]}: must be a finite number, got {value}")
            texts = value if isinstance(value, list) else [value]
            if not all(is_utf8(text) for text in texts if isinstance(text, str)):
                name = option.opts[0] if option.opts[0].startswith("-") else option.opts[0].upper()
                raise ConfigError(f"{name}: must be UTF-8")
        return super().invoke(ctx)


def _one_line(error: Any) -> str:
    """Return what is wrong with the arguments, with the nearest names for an unknown option."""
    option, near = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if near is None or option is None:
        return " ".join(str(error.format_message()).split())
    meant = f"; is {' or '.join(near)} meant?" if near else ""
    return f"{option}: there is no such option{meant}"


def with_model(flags: dict[str, Any], model_tag: str | None) -> dict[str, Any]:
    """Return the options, with the model given as a positional argument."""
    if model_tag is None:
        return flags
    if flags["model"] is not None:
        raise ConfigError("--model: given twice, as an option and as an argument")
    return flags | {"model": model_tag}
