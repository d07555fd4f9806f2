"""docs/models.md agrees with what the engine serves and refuses."""

from __future__ import annotations

import pytest
import transformers

from tests.docs.models_table import DOCUMENT, TYPES, row
from tests.docs.verdicts import verdict

LINES = DOCUMENT.read_text().splitlines()
SAMPLES = [
    "llama",
    "granite_swa",
    "qwen2_moe",
    "glm4_moe_lite",
    "minicpm3",
    "olmo3",
    "lfm2",
    "jamba",
    "kimi_k25",
    "longcat_flash",
]
REFUSED = ["bloom", "rwkv", "git", "hy_v4_vl", "diffllama", "zamba"]


@pytest.mark.parametrize("model_type", SAMPLES + REFUSED)
def test_a_types_verdict_is_the_listed_one(model_type: str) -> None:
    found = verdict(model_type)
    assert found.kind == ("served" if model_type in SAMPLES else "refused")
    assert row(model_type, found) in LINES, "run python -m tests.docs.models_table"


def test_every_type_is_listed_once() -> None:
    assert not any("Different" in line for line in LINES)
    if f"with Transformers {transformers.__version__};" not in DOCUMENT.read_text():
        pytest.skip(f"the list is of another version than Transformers {transformers.__version__}")
    listed = [line.split("`")[1] for line in LINES if line.startswith("| `")]
    assert sorted(listed) == TYPES
