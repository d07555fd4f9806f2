"""`tandem serve`, `tandem profile` with the same options, and `tandem key`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.commands import ConfigFile, ModelTag, with_model
from deploy.commands.options import with_config_options
from deploy.config import load_config


@with_config_options
def serve(model_tag: ModelTag = None, config: ConfigFile = None, **flags: Any) -> None:
    """Serve a model over HTTP, with the OpenAI API.

    Every option can also be set in the environment (--max-model-len as TANDEM_MAX_MODEL_LEN) or in a YAML
    file (--config). A flag overrides the environment, which overrides the file.
    """
    checked = load_config(with_model(flags, model_tag), config_file=config)
    from deploy.serve import serve as run

    raise typer.Exit(run(checked))


@with_config_options
def profile(
    model_tag: ModelTag = None,
    config: ConfigFile = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write the profile to.")] = Path(
        "profile.json"
    ),
    **flags: Any,
) -> None:
    """Measure the cost of steps, prompts and transfers for `tandem plan`. Takes the options of `serve`."""
    from rich.console import Console

    from deploy.profile import profile as run

    run(with_model(flags, model_tag), config, output, Console())


keys = typer.Typer(help="API keys.", no_args_is_help=True)


@keys.callback()
def _keys() -> None:
    """Makes `add` a subcommand: Typer would merge a single command with its group."""


@keys.command("add")
def add_key(
    name: Annotated[str, typer.Argument(help="Name of its owner in metrics and logs.")],
    api_key_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            envvar="TANDEM_API_KEY_FILE",
            help="File of keys; it is made if it does not exist.",
        ),
    ],
    requests_per_minute: Annotated[int | None, typer.Option(help="Default: no limit.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens of prompts and answers. Default: no limit.")
    ] = None,
    concurrent_requests: Annotated[int | None, typer.Option(help="Default: no limit.")] = None,
    priority: Annotated[
        int | None, typer.Option(help="Priority of its requests; lower comes first. Default: 0.")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="The key may also drain workers and the like.")
    ] = False,
) -> None:
    """Make an API key, print it, and write its hash to a file for `tandem serve --api-key-file`.

    The limits hold for each router separately. Only this output shows the key. To revoke the key, remove its
    line from the file; running servers notice at once.
    """
    from router.api_keys import add_key as add

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    typer.echo(add(api_key_file, name=name, priority=priority, operator=operator, **limits))
