"""A model whose products all use our kernels gives the same bits in every batch, and reports that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from engine.devices.torch.runner import torch_products
from engine.engine import Engine
from protocol.config import ServeConfig
from tests.e2e.architectures import write_model
from tests.engine.kernels import needs_kernel
from tests.engine.test_engine import ask, run

ROWS, WEIGHT, BIAS = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)


@pytest.mark.parametrize(
    ("product", "found"),
    [
        (lambda: ROWS @ WEIGHT.T, ["mm"]),
        (lambda: functional.linear(ROWS, WEIGHT, BIAS), ["addmm"]),
        (lambda: torch.einsum("rk,ok->ro", ROWS, WEIGHT), ["bmm"]),
        (lambda: ROWS[:, :1] @ WEIGHT[:1], []),
        (lambda: (ROWS * ROWS).sum(-1).exp(), []),
    ],
)
def test_sums_of_products_are_found(product: Any, found: list[str]) -> None:
    assert torch_products(product) == found


@needs_kernel
@pytest.mark.parametrize(
    ("model_type", "told"), [("gemma2", "yes"), ("gpt_oss", "no"), ("olmo_hybrid", "yes")]
)
def test_an_engine_reports_whether_its_bits_depend_on_the_batch(
    tmp_path: Path, model_type: str, told: str
) -> None:
    write_model(model_type, tmp_path)
    config = ServeConfig(
        model=str(tmp_path),
        device="cpu",
        dtype="bfloat16",
        compile="off",
        max_model_len=128,
        kv_cache_memory_bytes=2**24,
    )
    engine = Engine(config)
    assert engine.start_up["deterministic"] == told
    if told == "no":
        return
    logprobs = []
    for mates in (0, 7):
        for mate in range(mates):
            engine.add(ask(f"mate {mate}", [9 + mate, 8, 7 * mate], 12))
        engine.add(ask("asked", [5, 6, 7, 8, 9], 12, sampling={"logprobs": 3}))
        outputs = run(engine)["asked"]
        logprobs.append([output.logprobs for output in outputs])
    assert logprobs[0] == logprobs[1]
