"""Written tables agree with the code: served models in docs/models.md, flags in docs/from-vllm.md."""

from __future__ import annotations

import pytest
import transformers

from deploy.vllm_flags import RENAMED, SHORT
from tests.docs import vllm_flags_table
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


def test_the_page_has_the_flags() -> None:
    text = vllm_flags_table.DOCUMENT.read_text()
    assert vllm_flags_table.written(text) == text, "run python -m tests.docs.vllm_flags_table"
    assert [flag for flag in RENAMED if f"`--{flag}`" not in text] == []
    assert {long for long in SHORT.values() if f"--{long}" not in text} == set()
