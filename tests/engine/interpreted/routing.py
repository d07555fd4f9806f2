"""The choice of experts by our kernel in Triton's interpreter, compared with torch's operators."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.devices.cuda import experts as cuda_experts
from engine.devices.cuda.experts import Router, routes_of
from engine.devices.cuda.products import Routes, tile_linears
from engine.devices.torch.operations import _route, router_logits
from engine.load.rounding import round_layers
from engine.model.program import Activation, Experts, Product, Score
from engine.quantization.weight import CodeFormat

INPUTS = 1152
"""More than one program sums."""
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "softmax": (6, {"normalizes": True, "rounds": True}),
    "softmax of the chosen, with a bias": (40, {"score": Score.CHOSEN_SOFTMAX, "router_bias": True}),
    "sigmoid, rounded": (24, {"score": Score.SIGMOID, "rounds": True, "normalizes": True}),
    "groups": (
        21,
        {
            "score": Score.SIGMOID,
            "preferences": True,
            "groups": 3,
            "open_groups": 2,
            "normalizes": True,
            "least_sum": 1e-20,
            "scaling": 2.5,
            "is_exact": True,
        },
    ),
    "factors": (16, {"factors": True}),
    "more experts than a program takes of several rows": (1100, {"preferences": True}),
}


def experts_of(case: str) -> Experts:
    torch.manual_seed(0)
    count, given = CASES[case]
    made = {name: torch.randn(count) for name in ("router_bias", "preferences", "factors") if name in given}
    fields: dict[str, Any] = {
        "holder": None,
        "router": torch.randn(count, INPUTS) / 32,
        "router_bias": None,
        "chosen": 4,
        "score": Score.SOFTMAX,
        "preferences": None,
        "groups": 1,
        "open_groups": 1,
        "normalizes": False,
        "least_sum": 0.0,
        "scaling": 1.0,
        "is_exact": False,
        "rounds": False,
        "shared_gate": Product((nn.Linear(INPUTS, 1, bias=False).requires_grad_(False),)),
        "activation": Activation.SILU,
        "is_gated": True,
    }
    return Experts(**fields | given | made)


def listed(routes: Routes) -> dict[int, list[int]]:
    """Return the places of each expert that has any, in order."""
    found = defaultdict(list)
    for expert, begin, end in routes.tiles.tolist():
        if expert >= 0:
            assert 0 < end - begin <= routes.rows
            found[expert] += routes.places[begin:end].tolist()
    return {expert: sorted(places) for expert, places in found.items()}


def places_of(chosen: Tensor) -> dict[int, list[int]]:
    flat = chosen.flatten()
    return {expert: (flat == expert).nonzero().flatten().tolist() for expert in flat.unique().tolist()}


@pytest.mark.parametrize("case", CASES)
def test_it_chooses_and_lists_as_torch(case: str) -> None:
    """Few rows have small tiles, many large ones."""
    experts = experts_of(case)
    own, shared = (Router.of(experts, shared=is_shared) for is_shared in (False, True))
    for rows in (1, 20, 70):
        x = torch.randn(rows, INPUTS)
        expected, weights = _route(experts, router_logits(experts, x), x.dtype)
        chosen, found = own.choose(x)
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(found, weights, atol=1e-5, rtol=1e-5)
        routes, found = own.routes(x)
        torch.testing.assert_close(found, weights, atol=1e-5, rtol=1e-5)
        assert listed(routes) == places_of(chosen) == listed(routes_of(chosen, len(experts.router)))
        routes, found = shared.routes(x)
        all_rows = torch.full((rows, 1), len(experts.router))
        assert listed(routes) == places_of(torch.cat([chosen, all_rows], dim=1))
        assert experts.shared_gate is not None
        share = experts.shared_gate.linears[0](x).sigmoid()
        torch.testing.assert_close(found, torch.cat([weights, share], dim=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_same_bits_in_every_batch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of 16 rows and of 64."""
    experts, x = experts_of(case), torch.randn(70, INPUTS).bfloat16()
    router = Router.of(replace(experts, router=experts.router.bfloat16()), shared=True)
    alike = [router.routes(x[first : first + rows]) for first, rows in ((0, 1), (9, 7), (30, 40), (0, 70))]
    monkeypatch.setattr(cuda_experts, "_FEW_EACH", 0)
    routes, weights = router.routes(x)
    chosen = router.choose(x)[0]
    assert routes.rows == 64 and listed(routes) == places_of(chosen)
    for (few, found), first in zip(alike, (0, 9, 30, 0), strict=True):
        rows = slice(first, first + len(found))
        assert torch.equal(found, weights[rows]) and listed(few) == places_of(chosen[rows])
    assert alike[0][0].rows == 16


@pytest.mark.parametrize("case", ["softmax", "groups"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_usable_scores_changes_no_other(case: str, value: float) -> None:
    """It has experts of its own, each once, whose lists have room for its places."""
    router, x = Router.of(experts_of(case), shared=True), torch.randn(20, INPUTS)
    alone, weights = router.choose(x)
    x[7] = value
    chosen, found = router.choose(x)
    others = torch.arange(20) != 7
    assert torch.equal(chosen[others], alone[others]) and torch.equal(found[others], weights[others])
    assert len(chosen[7].unique()) == chosen.shape[1] and chosen[7].max() == len(router.experts.router)
    assert listed(router.routes(x)[0]) == places_of(chosen)


@pytest.mark.parametrize("format", CodeFormat)
def test_a_quantized_gate_opens_a_shared_expert_as_alone(format: CodeFormat) -> None:
    experts, x = experts_of("softmax"), torch.randn(5, INPUTS)
    assert experts.shared_gate is not None
    gate = nn.ModuleList(experts.shared_gate.linears)
    round_layers(gate, format)
    tile_linears(gate, torch.float32, plain=False)
    router = Router.of(replace(experts, shared_gate=Product((gate[0],))), shared=True)
    torch.testing.assert_close(router.routes(x)[1][:, -1:], gate[0](x).sigmoid(), atol=1e-5, rtol=1e-5)
