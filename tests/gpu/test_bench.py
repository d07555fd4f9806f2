"""`tandem bench gpu` with a small model."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.gpu.measure import GpuPlan, measure
from bench.gpu.model import DecoderShape, MadeUpModel
from bench.gpu.report import as_markdown
from bench.gpu.roofs import measured, roofs_of

SMALL = DecoderShape(4, 512, 1024, 16)


def test_it_measures_this_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reached = measured(torch.cuda.get_device_name(device), device)
    roofs = roofs_of(reached.name, reached)
    assert 0.3 * roofs.bytes_per_s < reached.bytes_per_s < 1.1 * roofs.bytes_per_s
    assert 0.2 * roofs.flops < reached.flops < 1.1 * roofs.flops
    plan = GpuPlan(batches=[1, 4], drafted=[0, 3], chunks=[128], context=128, acceptance=0.7)
    with torch.inference_mode():
        results = measure(MadeUpModel(SMALL, device, tmp_path, plan.longest), plan)
    for each in (*results.decode, *results.prefill):
        assert each.launches
        assert each.work.least_s(roofs) < each.device_s
    assert "share of the roof" in as_markdown("small", roofs, reached, plan, results)
