"""Tests, flags and files that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from bench.cli import app as bench
from deploy.cli import app as tandem
from deploy.spellings import ARITIES
from protocol.config import field_docs, flag_name

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for kind in ("py", "h", "cpp")
    for path in ROOT.glob(f"[a-z]*/**/*.{kind}")
]


def command_flags(command: Any) -> set[str]:
    """Return the flags of a command and of all its subcommands."""
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    for below in getattr(command, "commands", {}).values():
        flags |= command_flags(below)
    return flags


FLAGS = {flag_name(field) for field in field_docs()}
FLAGS |= {flag for app in (tandem, bench) for flag in command_flags(typer.main.get_command(app))}
FLAGS |= set(re.findall(r'addoption\(\s*"(--[a-z-]+)"', (ROOT / "tests/tiers/plugin.py").read_text()))
FLAGS |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / "tests/mutants/__main__.py").read_text()))

OTHERS = re.compile(r"^.*\b(docker (build|run|compose)|helm (install|upgrade)) .*$", re.MULTILINE)
SGLANG_CELL = re.compile(r"^\| `--model-path`[^|]*\|", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text()):
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (path, name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_module_that_a_document_names_exists(document: Path) -> None:
    """Some leave out the first folders. A module's part follows a colon."""
    named = re.findall(r"`([\w/]+\.(?:py|h|cpp))(?::([\w.:]+))?`", document.read_text())
    for path, part in named:
        sources = [source for source in SOURCES if f"/{source}".endswith(f"/{path}")]
        word = re.compile(rf"\b{re.split('[.:]', part)[-1]}\b" if part else "")
        assert any(word.search((ROOT / source).read_text()) for source in sources), (path, part)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_that_a_document_names_exists(document: Path) -> None:
    text = OTHERS.sub("", document.read_text())
    named, known = set(re.findall(r"--[a-z][a-z0-9-]+", text)), FLAGS
    if document.name == "from-vllm.md":
        known = FLAGS | {f"--{flag}" for flag in ARITIES} | {"--disaggregation-mode", "--help"}
        named = set(re.findall(r"--[a-z][a-z0-9-]+", SGLANG_CELL.sub("", text)))
    assert named <= known


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, *ROOT.glob("*.md"), ROOT / "bench/README.md"], ids=lambda path: path.name
)
def test_every_file_that_a_document_links_to_exists(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
