"""Heads in the native decoder equal those in torch. Chains in one call equal step-by-step ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.linear.packed_quantized import PackedQuantizedLinear
from engine.quantization.weight import CodeFormat
from protocol.speculation import Quantization, Verification
from speculation.eagle import EagleHead, head_program
from tests.engine.kernels import needs_kernel
from tests.speculation import eagle_files as files
from tests.speculation.eagle_engine import Watched
from tests.speculation.small_engine import write_noisy

pytestmark = needs_kernel

HEADS: dict[str, Callable[[Path], files.Published]] = {
    "eagle1": lambda target: files.eagle1(target),
    "eagle3": lambda _: files.eagle3(),
    "eagle3-own-width": lambda _: files.eagle3(width=40, reduced=False),
    "speculators-3.1": lambda _: files.speculators(norm_output=True),
}


def native(deep_target: Path, head: Path, **options: Any) -> Watched:
    return Watched(deep_target, head, **({"dtype": "bfloat16", "compile": "auto"} | options))


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(1, files.VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, "float32", 1e-5) for name in HEADS),
        ("eagle1", "bfloat16", 0.03),
        ("eagle3", "bfloat16", 0.03),
    ],
)
def test_native_rows_equal_torchs(
    name: str, dtype: str, tolerance: float, deep_target: Path, tmp_path: Path
) -> None:
    head = HEADS[name](deep_target).write(tmp_path / "head")
    assert_native_rows(native(deep_target, head, dtype=dtype), tolerance)


@pytest.mark.parametrize("reduced", [False, True])
def test_native_rows_equal_torchs_with_an_int8_target_head(
    reduced: bool, deep_target: Path, tmp_path: Path
) -> None:
    """EAGLE-1 uses the target's head. EAGLE-3 without its own uses some of that head's outputs."""
    published = files.eagle3() if reduced else files.eagle1(deep_target)
    published.tensors.pop("lm_head.weight", None)
    watched = native(deep_target, published.write(tmp_path / "head"), quantize_lm_head=True)
    head = watched.drafter._head
    assert isinstance(head, EagleHead)
    _, lm_head = head.tables(watched.target)
    assert isinstance(lm_head, PackedQuantizedLinear)
    assert lm_head.out_features == (files.DRAFT_VOCAB if reduced else files.VOCAB)
    assert_native_rows(watched)


@pytest.mark.parametrize(
    ("name", "format"), [("eagle1", "int8"), ("eagle3", "int4"), ("eagle3-target-s-lm-head", "int8")]
)
def test_a_quantized_head_equals_torchs(
    name: str, format: Quantization, deep_target: Path, tmp_path: Path
) -> None:
    published = files.eagle1(deep_target) if name == "eagle1" else files.eagle3()
    if name == "eagle3-target-s-lm-head":
        del published.tensors["lm_head.weight"]
    watched = native(deep_target, published.write(tmp_path / "head"), quantization=format)
    loaded = watched.drafter._head
    assert isinstance(loaded, EagleHead)
    rounded = [module for module in loaded.head.modules() if isinstance(module, PackedQuantizedLinear)]
    assert len(rounded) == 7, "all but the one whose 48 inputs fit no kernel"
    assert {module.format for module in rounded} == {CodeFormat(format)}
    assert isinstance(loaded.lm_head, type(None) if name == "eagle1" else PackedQuantizedLinear)
    assert_native_rows(watched)


def assert_native_rows(watched: Watched, tolerance: float = 0.03) -> None:
    head = watched.drafter._head
    assert isinstance(head, EagleHead)
    program = head_program(head.head, *head.tables(watched.target))
    watched.assert_native_rows(program, head.head.shape.hidden_size, tolerance)


def drafting(name: str, deep_target: Path, folder: Path, **options: Any) -> Watched:
    """Return an engine that drafts by a head, by a draft model, or by a model like its own."""
    options |= {"num_tokens": 5, "enable_prefix_caching": False}
    if name in HEADS:
        return native(deep_target, HEADS[name](deep_target).write(folder), **options)
    if name == "draft model":
        write_noisy(deep_target, folder)
    return native(
        deep_target, folder if name == "draft model" else deep_target, method="draft_model", **options
    )


def both_ways(watched: Watched, **sampling: Any) -> tuple[list[Any], list[Any]]:
    """Return what it drafts natively, then step by step, and the distributions."""
    drafts, distributions = [], []
    for in_one_call in (True, False):
        watched.drafts, watched.trees = [], []
        assert watched.drafter._drafting._native is not None
        if not in_one_call:
            watched.drafter._drafting._native = None
        for index in range(3):
            asked = {"seed": index, **sampling}
            watched.ask(str(index), prompt(index, 12 + index), 9 + 2 * index, sampling=asked)
        watched.run()
        drafts.append(watched.drafts)
        distributions.append([d.distributions for d in watched.trees if d.distributions is not None])
    return drafts, distributions


@pytest.mark.parametrize(
    ("name", "temperature", "verification"),
    [
        *((name, 0.8, rule) for name in ("eagle1", "eagle3") for rule in ("coupled", "standard")),
        ("eagle3", 0.0, "standard"),
        ("eagle3-own-width", 0.8, "coupled"),
        ("speculators-3.1", 0.8, "standard"),
        *(("draft model", *case) for case in ((0.0, "coupled"), (1.3, "coupled"), (1e-50, "standard"))),
        *(("itself", 0.8, rule) for rule in ("coupled", "standard")),
    ],
)
def test_chains_in_one_call_equal_step_by_step_ones(
    name: str, temperature: float, verification: Verification, deep_target: Path, tmp_path: Path
) -> None:
    """A model's own drafts are all right. A wrong order of rows, places or noise would cause rejections."""
    watched = drafting(name, deep_target, tmp_path / "head", verification=verification)
    drafts, distributions = both_ways(watched, temperature=temperature)
    assert drafts[0] == drafts[1]
    kinds = ("draft_tokens_total", "accepted_tokens_total")
    counters = watched.engine.counters().items()
    drafted, accepted = (sum(n for name, n in counters if kind in name) for kind in kinds)
    assert drafted > 40 and (accepted == drafted if name == "itself" else accepted < drafted)
    assert bool(distributions[0]) == (verification == "standard" and temperature > 0)
    for ours, theirs in zip(*distributions, strict=True):
        if temperature > 0.1:  # else equal scores share the probability, or one has it all
            torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-5)


def test_penalties_are_left_to_the_sampler(deep_target: Path, tmp_path: Path) -> None:
    watched = native(deep_target, files.eagle3().write(tmp_path / "head"))
    watched.ask("a", prompt(1, 12), 12, sampling={"repetition_penalty": 5.0})
    watched.run()
    for _, _, drafted in watched.drafts:
        assert len(set(drafted)) == len(drafted)
