"""Held-out code to go on with, and edits of given code, where copying is right. Never random tokens."""

from __future__ import annotations

import json
import keyword
import re
from collections import Counter
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from models.bundled import BUNDLED_FOLDER

Workload = Literal["completion", "edit"]
WORKLOADS: tuple[Workload, ...] = ("completion", "edit")
HELD_OUT = BUNDLED_FOLDER / "heldout_prompts.jsonl"

EDITED_LINES = 24
"""Of each held-out text, the last so many make the code to be edited."""

BEGUN = 3
"""An edited version begins with one of so many parts of the code."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


def load_prompts(
    workload: Workload, tokenizer: PreTrainedTokenizerBase, max_tokens: int, path: Path = HELD_OUT
) -> list[list[int]]:
    """Token ids of each prompt, of which at most the last `max_tokens` are kept."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    if workload == "completion":
        texts = [entry["prompt"] for entry in entries]
    else:
        texts = [edit_prompt(entry["prompt"] + entry["continuation"]) for entry in entries]
    return [tokenizer.encode(text, add_special_tokens=False)[-max_tokens:] for text in texts if text]


def edit_prompt(text: str) -> str | None:
    """The end of `text`, then the same with a name changed, up to a third; None where there is no name."""
    lines = text.splitlines()[-EDITED_LINES:]
    code = "\n".join(lines)
    name = _common_name(code)
    if name is None:
        return None
    renamed = re.sub(rf"\b{name}\b", f"new_{name}", code).splitlines()
    begun = "\n".join(renamed[: max(1, len(lines) // BEGUN)])
    return f"# Before:\n{code}\n\n# After renaming {name} to new_{name}:\n{begun}\n"


def _common_name(code: str) -> str | None:
    """The name that stands there most often, at least twice; the first of equals."""
    counts = Counter(name for name in _NAME.findall(code) if not keyword.iskeyword(name) and name != "self")
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    return name if count > 1 else None
