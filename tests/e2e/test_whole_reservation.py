"""Without paged KV, split and whole requests get the same tokens as with it."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.test_quantized_weights import run
from tests.worker.harness import Cluster, tiny_config
from tests.worker.tiny_model import write_tiny_llama

IDS = ["split-1", "split-3", "split-5"]


def test_reserving_the_longest_sequence_changes_no_token(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    answers = []
    for paged in (True, False):
        with Cluster() as cluster:
            prefill, decode = cluster.start_pair(tiny_config(tmp_path, paged_kv=paged))
            split = run(cluster, prefill, decode, IDS)
            assert run(cluster, decode, decode, [f"whole-{name[-1]}" for name in IDS]) == split
            cluster.wait_empty(prefill, decode)
            answers.append(split)
    assert answers[0] == answers[1]
