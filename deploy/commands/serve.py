"""`tandem serve`, `tandem profile` with the same options, and `tandem key`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import TextWrapper
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from deploy.commands import ConfigFile, ModelTag, with_model
from deploy.config import load_config
from deploy.spellings import rewrite
from protocol.config import field_docs, field_groups, field_types, flag_name

FIRST = ("host", "port", "api_key_file", "max_model_len", "speculative_config")
"""The options that most people need first."""


class ConfigCommand(TyperCommand):
    """A command with the configuration's options. Accepts vLLM's spelling of them, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for index, token in enumerate(args):
            flag, _, topic = token.partition("=")
            if flag in ctx.help_option_names:
                topic = topic or next(iter(args[index + 1 :]), "")
                ctx.meta["topic"] = topic.lstrip("-").replace("-", "_")
                typer.echo(self.get_help(ctx))
                ctx.exit()
        own = {name[2:] for option in self.params for name in option.opts if name.startswith("--")}
        return super().parse_args(ctx, rewrite(args, own))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the first options and the names in each group, or all options of the given topic."""
        shown = {option.name: option.get_help_record(ctx) for option in self.params}
        topic, groups = ctx.meta["topic"], field_groups()
        grouped = {field for _, group in groups.values() for field in group}

        def section(title: str, fields: Iterable[str]) -> None:
            with formatter.section(title):
                formatter.write_dl([shown[field] for field in fields if shown[field]])

        if topic in grouped:
            section("Option", [topic])
        elif topic in groups or topic == "all":
            for name, (title, fields) in groups.items():
                if topic in (name, "all"):
                    section(f"{name}: {title}".rstrip("."), fields)
        else:
            section("First options", [*(name for name in shown if name not in grouped), *FIRST])
            command = ctx.command_path
            with formatter.section(f"All options (see {command} --help all, --help GROUP or --help OPTION)"):
                lines = TextWrapper(formatter.width, subsequent_indent=" " * 15, break_on_hyphens=False)
                for name, (_, fields) in groups.items():
                    lines.initial_indent = f"  {name:12} "
                    formatter.write(lines.fill(" ".join(map(flag_name, fields))) + "\n")


def with_config_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a Typer command one option for each field of `ServeConfig`.

    The command gets them as keyword arguments; None stands for "not given". Values stay text: `load_config`
    checks them for all sources alike, and names the flag.
    """
    hints = get_type_hints(function, include_extras=True)
    given = inspect.signature(function).parameters.values()
    own = [each.replace(annotation=hints[each.name]) for each in given if each.kind is not each.VAR_KEYWORD]
    docs = field_docs()
    parameters = own + [_parameter(field, kind, *docs[field]) for field, kind in field_types().items()]

    def command(**values: Any) -> None:
        function(**values)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


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


def _metavar(annotation: Any) -> str:
    """Return the placeholder of a value in the help: its choices, or its type."""
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if get_origin(annotation) is Literal:
        return "[" + "|".join(str(argument) for argument in arguments) + "]"
    if arguments:
        return _metavar(arguments[0])
    return {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT")


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
    path = os.path.expanduser(api_key_file)  # the variable and --api-key-file=~/x come without a shell's
    typer.echo(add(path, name=name, priority=priority, operator=operator, **limits))
