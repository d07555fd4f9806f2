"""What `make serve` starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy.config import load_config

ROOT = Path(__file__).parents[2]
NAME = "TANDEM_SPECULATIVE_CONFIG"


@pytest.mark.parametrize(
    ("given", "method"), [(None, "suffix"), ('{"method": "ngram"}', "ngram"), ("", None)], ids=str
)
def test_make_serve_drafts_unless_it_is_told_otherwise(
    tmp_path: Path, given: str | None, method: str | None
) -> None:
    tandem = tmp_path / "tandem"
    tandem.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" "${NAME}"\n')
    tandem.chmod(0o755)
    others = {name: value for name, value in os.environ.items() if name != NAME}
    command = ["make", "--silent", "--old-file=.venv/.installed", "serve", f"BIN={tmp_path}", "ARGS=--port 1"]
    environ = others | ({} if given is None else {NAME: given})
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    arguments, config, *_ = [*done.stdout.split("\n"), ""]
    assert arguments == "serve --port 1"
    found = load_config({}, environ={NAME: config}).speculative_config
    assert (found and found.method) == method
