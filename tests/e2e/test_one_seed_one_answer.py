"""A seeded request gives the same tokens however it is served. fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.config import ServeConfig
from tests.e2e.architectures import VOCAB_SIZE, write_model
from tests.e2e.test_token_equality import prompts
from tests.worker.harness import Cluster, request, tiny_config

NUM_TOKENS = 24
PROMPT = prompts([75], seed=5)[0]

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "seed": -3},
    {
        "temperature": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 3.0, 9: -5.0},
        "seed": 2**62,
    },
]


class Serving:
    """A way of serving: the workers, and the transport between their pools."""

    def __init__(self, cluster: Cluster, config: ServeConfig, disaggregated: bool) -> None:
        self.cluster = cluster
        self.decode = cluster.start("decode", "decode-0", config)
        self.prefill = cluster.start("prefill", "prefill-0", config) if disaggregated else None
        self._first = self.prefill or self.decode
        self._then = {} if self.prefill is None else {"decode": self.decode.address}

    def answers(self, name: str) -> list[list[int]]:
        asked = [request(f"{name}-{n}", PROMPT, NUM_TOKENS, **each) for n, each in enumerate(SAMPLING)]
        return [self.cluster.serve(self._first, each, **self._then) for each in asked]

    def answers_in_a_crowd(self) -> list[list[int]]:
        asked = [
            request(f"other-{n}", prompt, NUM_TOKENS, temperature=0.1 * n, top_k=5 * n, seed=n)
            for n, prompt in enumerate(prompts([9 * n + 3 for n in range(12)], 8))
        ]
        asked += [request(f"crowd-{n}", PROMPT, NUM_TOKENS, **each) for n, each in enumerate(SAMPLING)]
        for each in asked:
            self.cluster.generate(self._first, each, **self._then)
        self.cluster.run(*(each.request_id for each in asked))
        return [self.cluster.tokens(each.request_id) for each in asked[-len(SAMPLING) :]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Return the tokens of requests served one after another by one worker without cached prefixes."""
    with Cluster() as cluster:
        serving = Serving(cluster, tiny_config(model, enable_prefix_caching=False), disaggregated=False)
        answers = serving.answers("alone")
    assert len({tuple(tokens) for tokens in answers}) == len(SAMPLING)
    assert all(0 <= token < VOCAB_SIZE for tokens in answers for token in tokens)
    return answers


def test_colocated_in_a_batch_and_after_a_prefix_hit(model: Path, expected: list[list[int]]) -> None:
    with Cluster() as cluster:
        serving = Serving(cluster, tiny_config(model), disaggregated=False)
        assert serving.answers_in_a_crowd() == expected
        hits = serving.decode.state.prefix_hit_tokens
        assert serving.answers("hit") == expected
        cluster.wait_empty(serving.decode)
        assert serving.decode.state.prefix_hit_tokens > hits


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_disaggregated(model: Path, expected: list[list[int]], transport: str) -> None:
    with Cluster() as cluster:
        serving = Serving(cluster, tiny_config(model, kv_transports=transport), disaggregated=True)
        assert serving.answers("alone") == expected
        assert serving.answers_in_a_crowd() == expected
        assert serving.prefill is not None
        cluster.wait_empty(serving.prefill, serving.decode)
        assert set(serving.prefill.state.transports.values()) == {transport}


def test_chunks_of_another_size(model: Path, expected: list[list[int]]) -> None:
    with Cluster() as cluster:
        config = tiny_config(model, max_num_batched_tokens=17, max_num_seqs=8, block_size=8)
        assert Serving(cluster, config, disaggregated=True).answers_in_a_crowd() == expected
