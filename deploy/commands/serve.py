"""`tandem serve`, and `tandem profile` with the same options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.commands.common import ConfigFile, ModelTag, failures, with_model
from deploy.config import load_config
from deploy.options import with_config_options


@with_config_options
def serve(
    model_tag: ModelTag = None,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Serve a model over HTTP, with the OpenAI API.

    Every option can also be set in the environment (--max-model-len as TANDEM_MAX_MODEL_LEN) or in a YAML
    file (--config). A flag overrides the environment, which overrides the file.
    """
    with failures():
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
    """Measure the cost of steps, prompts and transfers here, for `tandem plan`. Takes the options of
    `serve`.
    """
    from rich.console import Console

    from deploy.profile import profile as run

    with failures():
        run(with_model(flags, model_tag), config, output, Console())
