"""docs/from-vllm.md has all flags of vLLM that Tandem knows."""

from __future__ import annotations

from deploy.vllm_flags import RENAMED, SHORT
from tests.docs.vllm_flags_table import DOCUMENT, written


def test_the_page_has_the_flags() -> None:
    text = DOCUMENT.read_text()
    assert written(text) == text, "run python -m tests.docs.vllm_flags_table"
    assert [flag for flag in RENAMED if f"`--{flag}`" not in text] == []
    assert {long for long in SHORT.values() if f"--{long}" not in text} == set()
