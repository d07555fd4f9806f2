"""Prompts with real text, never random tokens: held-out code to continue, edits of given code, where copying
is right, and people's questions.
"""

from __future__ import annotations

import json
import keyword
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from models.bundled import BUNDLED_FOLDER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WorkloadName = Literal["completion", "edit", "chat", "code", "json", "long-form", "rewrite"]
WORKLOADS: tuple[WorkloadName, ...] = get_args(WorkloadName)
HELD_OUT = BUNDLED_FOLDER / "heldout_prompts.jsonl"
ASKED = Path(__file__).parent / "prompts.jsonl"

EDITED_LINES = 24
"""Number of a held-out text's last lines that are the code to edit."""

BEGUN = 3
"""Divisor: a prompt contains the first 1 / `BEGUN` of the edited version."""


class WorkloadPrompt(NamedTuple):
    """A prompt, and the grammar of its answer. `ends`: the answer ends where the model ends it. `copy` counts
    how often a run has had the prompt before.
    """

    token_ids: list[int]
    ends: bool = False
    grammar: str | None = None
    copy: int = 0


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


def load_prompts(
    workload: WorkloadName, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[WorkloadPrompt]:
    """Return a workload's prompts. A model without a chat template gets a question as text to continue."""
    if workload in ("completion", "edit"):
        held_out = _lines(HELD_OUT)
        texts = [entry["prompt"] for entry in held_out]
        if workload == "edit":
            texts = [edit_prompt(entry["prompt"] + entry["continuation"]) for entry in held_out]
        encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts if text)
        return [WorkloadPrompt(token_ids[-max_tokens:]) for token_ids in encoded]
    asked = [_asked(entry, tokenizer) for entry in entries(workload)]
    return [prompt for prompt in asked if len(prompt.token_ids) <= max_tokens]


def _asked(entry: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> WorkloadPrompt:
    """Return the model's prompt for an entry."""
    from router.grammars.json_schemas import schema_grammar

    grammar = schema_grammar(entry["schema"], "schema") if "schema" in entry else None
    if tokenizer.chat_template is None:
        return WorkloadPrompt(tokenizer.encode(f"{entry['prompt']}\n\n"), True, grammar)
    message = {"role": "user", "content": entry["prompt"]}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return WorkloadPrompt(tokenizer.encode(str(text), add_special_tokens=False), True, grammar)


def entries(workload: WorkloadName) -> list[dict[str, Any]]:
    """Return a chat workload's questions: `prompt`, and perhaps the `schema` of the answer."""
    if workload != "rewrite":
        return [entry for entry in _lines(ASKED) if entry["workload"] == workload]
    texts = [rewrite_prompt(entry["prompt"] + entry["continuation"]) for entry in _lines(HELD_OUT)]
    return [{"prompt": text} for text in texts if text]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite_prompt(text: str) -> str | None:
    """Ask for the end of `text` with a name changed; None if it has no name."""
    lines, name = _code_to_edit(text)
    if name is None:
        return None
    task = f"Rename {name} to new_{name} in this code. Answer with the whole new code."
    return "\n".join([task, "", "```python", *lines, "```"])


def edit_prompt(text: str) -> str | None:
    """Return the end of `text`, then the first third of the same code with a name changed; None if it has no
    name.
    """
    lines, name = _code_to_edit(text)
    if name is None:
        return None
    code = "\n".join(lines)
    renamed = re.sub(rf"\b{name}\b", f"new_{name}", code).splitlines()
    begun = "\n".join(renamed[: max(1, len(lines) // BEGUN)])
    return f"# Before:\n{code}\n\n# After renaming {name} to new_{name}:\n{begun}\n"


def _code_to_edit(text: str) -> tuple[list[str], str | None]:
    """Return the last lines of `text` and the name to change, if there is one."""
    lines = text.splitlines()[-EDITED_LINES:]
    return lines, _common_name("\n".join(lines))


def _common_name(code: str) -> str | None:
    """Return the most frequent name, the first of equals, or None if no name occurs twice."""
    counts = Counter(name for name in _NAME.findall(code) if not keyword.iskeyword(name) and name != "self")
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    return name if count > 1 else None
