"""Held-out code to continue, and edits of given code, where copying is right. Never random tokens."""

from __future__ import annotations

import json
import keyword
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from models.bundled import BUNDLED_FOLDER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WorkloadName = Literal["completion", "edit"]
WORKLOADS: tuple[WorkloadName, ...] = ("completion", "edit")
HELD_OUT = BUNDLED_FOLDER / "heldout_prompts.jsonl"

EDITED_LINES = 24
"""The code to edit is this many last lines of a held-out text."""

BEGUN = 3
"""A prompt contains the first 1 / `BEGUN` of the edited version."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


def load_prompts(
    workload: WorkloadName, tokenizer: PreTrainedTokenizerBase, max_tokens: int, path: Path = HELD_OUT
) -> list[list[int]]:
    """Return the token ids of each prompt, at most its last `max_tokens`."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    if workload == "completion":
        texts = [entry["prompt"] for entry in entries]
    else:
        texts = [edit_prompt(entry["prompt"] + entry["continuation"]) for entry in entries]
    return [tokenizer.encode(text, add_special_tokens=False)[-max_tokens:] for text in texts if text]


def edit_prompt(text: str) -> str | None:
    """Return the end of `text`, then the first third of the same code with a name changed; None if it has no
    name.
    """
    lines = text.splitlines()[-EDITED_LINES:]
    code = "\n".join(lines)
    name = _common_name(code)
    if name is None:
        return None
    renamed = re.sub(rf"\b{name}\b", f"new_{name}", code).splitlines()
    begun = "\n".join(renamed[: max(1, len(lines) // BEGUN)])
    return f"# Before:\n{code}\n\n# After renaming {name} to new_{name}:\n{begun}\n"


def _common_name(code: str) -> str | None:
    """Return the most frequent name, the first of equals, or None if no name occurs twice."""
    counts = Counter(name for name in _NAME.findall(code) if not keyword.iskeyword(name) and name != "self")
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    return name if count > 1 else None
