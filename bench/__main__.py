"""`python -m bench` is `tandem bench`."""

from bench.cli import app

app()
