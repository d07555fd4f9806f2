"""The command line: lists the commands in the order of `tandem --help`."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from deploy.commands import Command, Commands, HomeCommand, clients, offline
from deploy.commands.serve import ConfigCommand, keys, profile, serve
from protocol.errors import ConfigError

app = typer.Typer(
    cls=Commands,
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def version() -> None:
    """Print the version."""
    from protocol.version import version as installed

    typer.echo(installed())


def _version_option(is_given: bool) -> None:
    if is_given:
        version()
        raise typer.Exit


@app.callback()
def _prepare(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version_option, help="Print it.")
    ] = False,
) -> None:
    """Make Ctrl-C raise KeyboardInterrupt, except in `serve`, which sets handlers of its own.

    Raises `ConfigError` if the working folder was deleted: relative paths, and Ray, need one.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working folder was deleted: change to another one") from error
    if context.invoked_subcommand != "serve":
        signal.signal(signal.SIGINT, signal.default_int_handler)


app.command(cls=ConfigCommand, no_args_is_help=False)(serve)
for operate in (
    clients.status,
    clients.top,
    clients.drain,
    clients.role,
    clients.restart,
    clients.scale,
    clients.doctor,
    clients.complete,
    clients.batch,
):
    app.command(cls=Command)(operate)
app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(offline.bench)
app.command(cls=ConfigCommand, no_args_is_help=False)(profile)
app.command(cls=HomeCommand)(offline.plan)
app.command(cls=Command)(offline.quantize)
app.command()(version)
app.add_typer(keys, name="key")
app.add_typer(offline.speculate, name="speculate")
