"""KV that a quantized transfer changed never counts as computed: tokens depend on no transport."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from kvtransfer.transports.registry import TransportOptions
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.peer_ends import PrefillEnd, closing
from tests.worker.test_worker_handoff import prompt
from tests.worker.tiny_model import greedy
from worker.setup import build_engine

CHANGING = {
    "int8 on the wire": ({"kv_transports": "tcp", "kv_wire_dtype": "int8"}, {}),
    "fp8 on the wire": ({"kv_transports": "tcp", "kv_wire_dtype": "fp8"}, {}),
    "computed in another dtype": ({}, {"dtype": "bfloat16"}),
}
BLOCKS = 6
LENGTH = 16 * BLOCKS


def whole(cluster: Cluster, worker: RunningWorker, name: str) -> int | None:
    """Run the prompt on one worker. Return how many of its tokens were cached."""
    cluster.generate(worker, request(name, prompt(LENGTH)))
    cluster.run(name)
    return cluster.outputs[name][0][1].cached_tokens


@pytest.mark.parametrize("case", CHANGING)
def test_a_whole_request_never_uses_changed_blocks(
    cluster: Cluster, model_folder: Path, reference: PreTrainedModel, case: str
) -> None:
    options, of_prefill = CHANGING[case]
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder, **options, **of_prefill))
    decode = cluster.start("decode", "decode-0", tiny_config(model_folder, **options))
    for name in ("first", "again"):
        cluster.generate(prefill, request(name, prompt(LENGTH)), decode.address)
        cluster.run(name)
    assert whole(cluster, decode, "alone") == 0
    assert cluster.tokens("alone") == greedy(reference, prompt(LENGTH), 12)
    cluster.wait_empty(prefill, decode)
    assert prefill.counter("kv_blocks_pushed_total") == BLOCKS
    assert prefill.counter("kv_blocks_skipped_total") == BLOCKS  # requests over the same transport share them


def test_unexpectedly_quantized_blocks_are_not_kept(cluster: Cluster, model_folder: Path) -> None:
    """This happens when the expected transport breaks and the next one quantizes."""
    decode = cluster.start("decode", "decode-0", tiny_config(model_folder, kv_transports="tcp"))
    engine, pool = build_engine(tiny_config(model_folder))
    options = TransportOptions(wire_dtype="int8")
    for peer in closing(
        PrefillEnd(cluster, decode.address, engine, pool, transports=["tcp"], wire_options=options)
    ):
        asked = request("r", prompt(LENGTH))
        grant = peer.reserve(asked)
        blocks, first_token = peer.prefill(asked)
        peer.push(grant, blocks)
        peer.hand_off(asked, grant, first_token)
        cluster.run("r")
    assert whole(cluster, decode, "alone") == 0
