"""`python -m bench.gpu` is `tandem bench gpu`, for hosts without the packages of other commands."""

import typer

from bench.gpu.command import gpu

typer.run(gpu)
