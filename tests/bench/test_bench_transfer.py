"""`tandem bench transfer`: its figures, and measurements of real pairs of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.transfer import raw
from bench.transfer.command import measure
from bench.transfer.process import ProcessObject, processes
from bench.transfer.row import TransferRow, ratio_row
from bench.transfer.sides import Pair, scattered


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    figure = ratio_row("shm", [(1.0, 2.0), (4.0, 4.0), (9.0, 3.0)], 10**9, at_least=0.85, baseline="memcpy")
    assert figure.samples == [0.5, 1.0, 3.0]
    assert figure.value == 1.0
    assert str(figure) == "shm: 1 (target >= 0.85: reached); 0.33 GB/s against memcpy 0.25 GB/s"


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        ({"at_least": 2.0}, "target >= 2 ms: missed"),
        ({"at_least": 1.0}, "target >= 1 ms: reached"),
        ({"at_most": 0.5}, "target <= 0.5 ms: missed"),
        ({"at_most": 1.0}, "target <= 1 ms: reached"),
        ({}, ""),
    ],
)
def test_targets(limits: dict[str, Any], verdict: str) -> None:
    assert TransferRow(what="x", value=1.0, unit=" ms", **limits).verdict == verdict


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_pair_moves_its_blocks(transport: str) -> None:
    with Pair([transport], 4096, 64) as pair:
        for _ in range(2):
            moved = pair.move(transport, scattered(64))
            assert moved.nbytes == 64 * 4096 and moved.num_extents > 32
        assert pair.move(transport, range(64)).num_extents == 1
        assert min(pair.memcpy(), pair.raw_stream(), pair.cpu_seconds()) > 0


def test_the_other_rows_do_without_ray() -> None:
    code = "import sys, bench.transfer.raw, bench.transfer.nixl; sys.exit('ray' in sys.modules)"
    forked = processes.Process(target=exec, args=(code, {}))
    forked.start()
    forked.join()
    assert forked.exitcode == 0


def test_the_wires_beyond_move_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "TOTAL_BYTES", 8 * 1024 * 1024)
    figures = [*measure("tls", 1), *measure("object_store", 1)]
    assert [figure.what.split(",")[0] for figure in figures] == ["TLS", "object_store"]
    assert all(figure.value > 0 for figure in figures)


class Failing:
    def fail(self, text: str) -> None:
        raise ValueError(text)

    def close(self) -> None:
        return


def test_an_error_in_a_process_is_raised_here() -> None:
    with ProcessObject(Failing) as remote, pytest.raises(RuntimeError, match="ValueError: no such thing"):
        remote.call("fail", "no such thing")


def test_rows_and_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(raw, "TOTAL_BYTES", 8 * 1024 * 1024)
    folder = tmp_path / "deep"
    result = CliRunner().invoke(
        app, ["transfer", "--rows", "shm,tcp", "--repeats", "1", "--output", str(folder)]
    )
    assert result.exit_code == 0, result.output
    document = json.loads((folder / "results.json").read_text())
    assert [figure["at_least"] for figure in document["figures"]] == [0.85, None, 0.9, 0.9]
    assert all(figure["value"] > 0 and len(figure["samples"]) == 1 for figure in document["figures"])
    assert "blocks of 1792 KiB" in result.output
