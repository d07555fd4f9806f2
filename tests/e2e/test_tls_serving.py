"""A prefill and a decode worker with TLS between them."""

from __future__ import annotations

from pathlib import Path

from bench.transfer.certificates import Authority
from tests.e2e.architectures import write_model
from tests.e2e.test_token_equality import NUM_TOKENS, prompts, run_all
from tests.worker.harness import Cluster, tiny_config
from tests.worker.tiny_model import greedy, load


def test_tokens_equal_generate(tmp_path: Path) -> None:
    files = Authority(tmp_path / "tls").issue("worker")
    model = tmp_path / "model"
    model.mkdir()
    write_model("llama", model)
    reference = load(model)
    batch = prompts([1, 16, 100, 200], seed=1)
    config = tiny_config(
        model, kv_transports="tcp", kv_tls_cert=files.cert, kv_tls_key=files.key, kv_tls_ca=files.ca
    )
    with Cluster() as cluster:
        prefill, decode = cluster.start_pair(config)
        tokens = run_all(cluster, prefill, decode, "request", batch)
        assert tokens == [greedy(reference, prompt, NUM_TOKENS) for prompt in batch]
        cluster.wait_empty(prefill, decode)
        assert prefill.state.transports == {"decode-0": "tcp"}
        (pair,) = prefill.state.pairs
        assert (pair.peer, pair.transport) == ("decode-0", "tcp")
        assert pair.counters["kv_transfer_pieces_total"] >= len(batch)
