"""Writes the tables of docs/models.md, which tell for every model of Transformers whether it is served:
`python -m tests.docs.models_table`, which takes a minute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.docs.verdicts import Verdict, verdict
from tests.e2e.architectures import ARCHITECTURES, HYBRIDS

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})

SECTIONS = {"served": "Served", "refused": "Refused", "untried": "Not tried"}
"""The heading of each verdict's table."""


def row(model_type: str, found: Verdict) -> str:
    if found.kind != "served":
        return f"| `{model_type}` | {found.reason.replace('|', '/')} |"
    name = found.served_class
    forward = "native" if found.is_native else "eager" if found.is_recurrent else "torch.compile"
    kept = ", latents" if found.keeps_latents else ""
    emphasis = "**" if model_type in ARCHITECTURES | HYBRIDS else ""
    same_bits = "yes" if found.is_deterministic else "no"
    return f"| `{model_type}` | {emphasis}`{name}`{emphasis} | {forward}{kept} | {same_bits} |"


def with_rows(text: str, heading: str, rows: Iterable[str]) -> str:
    """Return a page's text with other rows in the table below a heading."""
    table = re.compile(rf"(^## {heading}$.*?^\|---[^\n]*\n)(?:\|[^\n]*\n)*", re.DOTALL | re.MULTILINE)
    lines = "".join(f"{row}\n" for row in rows)
    return table.sub(lambda match: match[1] + lines, text, count=1)


def document(text: str, verdicts: dict[str, Verdict]) -> str:
    """Return the page's text with the verdicts of all types. Raises `KeyError` for one without a table."""
    rows: dict[str, list[str]] = {heading: [] for heading in SECTIONS.values()}
    for model_type, found in verdicts.items():
        rows[SECTIONS[found.kind]].append(row(model_type, found))
    for heading, lines in rows.items():
        text = with_rows(text, heading, lines)
    return re.sub(r"(?<=with Transformers )[\d.]+(?=;)", transformers.__version__, text)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    DOCUMENT.write_text(document(DOCUMENT.read_text(), {each: verdict(each) for each in TYPES}))
