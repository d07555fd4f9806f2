"""Writes the tables of vLLM's flags in docs/from-vllm.md: `python -m tests.docs.vllm_flags_table`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from deploy.vllm_flags import NEEDLESS, REFUSED

DOCUMENT = Path(__file__).parents[2] / "docs" / "from-vllm.md"


def written(text: str) -> str:
    """Return the page's text with the tables as the flags are now."""
    for name, head, table in (("needless", "because", NEEDLESS), ("refused", "the line", REFUSED)):
        rows = f"<!-- {name} -->\n| vLLM | {head} |\n|---|---|\n{_rows(table)}<!-- end -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, rows=rows: rows, text, flags=re.DOTALL)
    return text


def _rows(table: Mapping[str, str]) -> str:
    return "".join(f"| {_flags(flags)} | {_code(line)} |\n" for line, flags in table.items())


def _flags(flags: str) -> str:
    return ", ".join(f"`--{flag.rstrip('=+')}`" for flag in flags.split())


def _code(line: str) -> str:
    return re.sub(r"(?<![`\w])(--[a-z-]+[a-z])", r"`\1`", line)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
