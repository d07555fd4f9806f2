"""Experts' weights stay in a GPU's memory as they are stored."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from tests.engine.devices.expert_memory import EXPERT_MODELS, dense_bytes, weight_bytes

MOST = {"gpt-oss-120b in MXFP4": 66e9, "Qwen3-30B-A3B in bf16": 61.2e9, "Qwen3-30B-A3B in int4": 18e9}
"""gpt-oss-120b fits one GPU of 80 GB."""


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_weights_take_no_more_memory_than_their_codes_and_scales(name: str) -> None:
    found, dense = weight_bytes(name), dense_bytes(name)
    assert sum(found.values()) < MOST[name]
    assert sum(found.values()) <= dense
    if "MXFP4" in name:
        assert 16 * found["experts"] / (dense - found["other"]) == pytest.approx(4.25, abs=0.02), "bits"
