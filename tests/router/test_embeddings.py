"""`/v1/embeddings`, `/score` and `/v1/rerank`, with workers that return vectors of two values."""

from __future__ import annotations

import math

import pytest

from protocol.config import ServeConfig
from tests.router.conftest import RunningRouter
from tests.router.router_clients import openai_client

TEXTS = ["the quick brown fox", "a lazy dog", "numbers 0 1 2"]


@pytest.fixture(scope="module")
def embedder(model_folder):
    config = ServeConfig(model=str(model_folder), port=0, placement="least_loaded", enable_embeddings=True)
    router = RunningRouter(config)
    router.add_worker()
    yield router
    router.close()


@pytest.fixture(scope="module")
def client(embedder):
    with openai_client(embedder.url) as client:
        yield client


def vector(token_ids: list[int]) -> list[float]:
    """Return the fake worker's vector."""
    length = math.hypot(token_ids[0], token_ids[-1])
    return [token_ids[0] / length, token_ids[-1] / length]


def ids(embedder, text: str) -> list[int]:
    return embedder.server.state.tokenizer.encode(text)


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_texts_and_tokens(embedder, client, encoding):
    """By default the client asks for base64 and decodes it."""
    for given in (TEXTS, [ids(embedder, text) for text in TEXTS]):
        answer = client.embeddings.create(model="test-model", input=given, **encoding)
        assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == "test-model"
        for each, text in zip(answer.data, TEXTS, strict=True):
            if encoding.get("encoding_format") == "base64":
                assert isinstance(each.embedding, str)
                continue
            assert each.embedding == pytest.approx(vector(ids(embedder, text)), abs=1e-6)
        num_tokens = sum(len(ids(embedder, text)) for text in TEXTS)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    sampling = embedder.workers[0].generated[-1].sampling
    assert sampling.embeds and sampling.max_tokens == 1


def test_one_text_its_end_and_many(embedder, client):
    (one,) = client.embeddings.create(model="test-model", input=TEXTS[0]).data
    assert one.embedding == pytest.approx(vector(ids(embedder, TEXTS[0])), abs=1e-6)
    cut = client.embeddings.create(
        model="test-model", input=TEXTS[0], extra_body={"truncate_prompt_tokens": 2}
    )
    assert cut.data[0].embedding == pytest.approx(vector(ids(embedder, TEXTS[0])[-2:]), abs=1e-6)
    assert len(client.embeddings.create(model="test-model", input=["x"] * 300).data) == 300


def score(embedder, path="/score", **fields):
    return embedder.http.post(path, json=fields)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_as_they_are_scored(embedder, path):
    scores = [each["score"] for each in score(embedder, text_1=TEXTS[0], text_2=TEXTS).json()["data"]]
    best = sorted(range(3), key=lambda index: -scores[index])
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    answer = score(embedder, path, query=TEXTS[0], documents=documents).json()
    found = [(each["index"], each["relevance_score"], each["document"]) for each in answer["results"]]
    assert found == [(index, scores[index], {"text": TEXTS[index]}) for index in best]
    few = score(embedder, path, query=TEXTS[0], documents=documents, top_n=2, return_documents=False).json()
    assert few["results"] == [{"index": index, "relevance_score": scores[index]} for index in best[:2]]
    assert few["usage"] == answer["usage"] and few["model"] == "test-model"


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores(embedder, path):
    vectors = [vector(ids(embedder, text)) for text in TEXTS]
    near = [sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors]
    for first in (TEXTS[0], [TEXTS[0]]):
        answer = score(embedder, path, text_1=first, text_2=TEXTS).json()
        assert [each["score"] for each in answer["data"]] == pytest.approx(near, abs=1e-6)
    pairs = score(embedder, text_1=TEXTS, text_2=TEXTS).json()
    assert [each["score"] for each in pairs["data"]] == pytest.approx([1, 1, 1], abs=1e-6)
    assert pairs["usage"]["prompt_tokens"] == 2 * sum(len(ids(embedder, text)) for text in TEXTS)
    (alone,) = score(embedder, text_1=TEXTS[1], text_2=TEXTS[1]).json()["data"]
    assert alone["object"] == "score" and alone["score"] == pytest.approx(1)


BAD = {
    "no input": ("/v1/embeddings", {}, "input"),
    "an empty text": ("/v1/embeddings", {"input": ["x", ""]}, "input"),
    "too long": ("/v1/embeddings", {"input": "a b " * 1000}, "input"),
    "too many": ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
    "unknown tokens": ("/v1/embeddings", {"input": [5, 600]}, "input"),
    "a format": ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
    "dimensions": ("/v1/embeddings", {"input": "x", "dimensions": 1}, "dimensions"),
    "no end": ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "no second text": ("/score", {"text_1": "x"}, "text_2"),
    "no text": ("/score", {"text_1": "x", "text_2": []}, "text_2"),
    "pairs that do not match": ("/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "text_1"),
    "no query": ("/v1/rerank", {"documents": ["x"]}, "query"),
    "no documents": ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
    "a document without a text": ("/v1/rerank", {"query": "x", "documents": [{}]}, "documents[0].text"),
    "an empty document": ("/v1/rerank", {"query": "x", "documents": ["x", ""]}, "documents"),
    "no results": ("/v1/rerank", {"query": "x", "documents": ["x"], "top_n": 0}, "top_n"),
    "fields to rank by": (
        "/v1/rerank",
        {"query": "x", "documents": ["x"], "rank_fields": ["a"]},
        "rank_fields",
    ),
    "an empty second text": ("/score", {"text_1": "x", "text_2": ""}, "text_2"),
}


@pytest.mark.parametrize(("path", "body", "field"), BAD.values(), ids=BAD)
def test_bad_input_names_the_field(embedder, path, body, field):
    answer = embedder.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_a_server_without_embeddings_says_so(router):
    ranking = ("/v1/rerank", {"query": "x", "documents": ["y"]})
    scores = ("/score", {"text_1": "x", "text_2": "y"})
    for path, body in (("/v1/embeddings", {"input": "x"}), scores, ranking):
        answer = router.http.post(path, json=body)
        assert answer.status_code == 400 and "--enable-embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, "input"),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}, "text_2"),
    ],
)
def test_more_texts_than_the_queue_holds_are_refused(make_router, path, fields, param):
    router = make_router(enable_embeddings=True, max_queued_requests=2)
    router.add_worker()
    answer = router.http.post(path, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "3 texts exceed the limit of 2 sequences (--max-queued-requests)" in error["message"]
