"""Models with recurrent layers give the tokens of `transformers.generate`: through a prefill and a decode
worker, and resumed after a death.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.e2e.architectures import HYBRIDS, write_model
from tests.e2e.test_token_equality import prompts, run_all
from tests.worker.harness import Cluster, request, tiny_config
from tests.worker.tiny_model import greedy, load

CHUNK = 50
"""`max_num_batched_tokens`: no multiple of the grid."""

LENGTHS = [1, 15, 16, 17, 49, 111]
NUM_TOKENS = 20

pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="this Transformers' recurrent layers call other functions",
)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_tokens_equal_generate(model_type: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path)
    reference = load(tmp_path)
    batch = prompts(LENGTHS, seed=1)
    expected = [greedy(reference, prompt, NUM_TOKENS) for prompt in batch]
    assert len({token for tokens in expected for token in tokens}) > NUM_TOKENS // 2, (
        "a test that cannot fail"
    )
    with Cluster() as cluster:
        config = tiny_config(tmp_path, max_num_batched_tokens=CHUNK, max_num_seqs=5)
        prefill, decode = cluster.start_pair(config)
        assert run_all(cluster, prefill, decode, "first", batch) == expected
        cluster.wait_empty(prefill, decode)
        # What was generated before a worker died comes with the request.
        ids = [f"resumed-{index}" for index in range(len(batch))]
        for request_id, prompt, tokens in zip(ids, batch, expected, strict=True):
            resumed = request(request_id, prompt, NUM_TOKENS)
            resumed.output_token_ids.extend(tokens[:7])
            cluster.generate(prefill, resumed, decode.address)
        cluster.run(*ids, timeout_s=60)
        assert [cluster.tokens(request_id) for request_id in ids] == [tokens[7:] for tokens in expected]
        cluster.wait_empty(prefill, decode)
