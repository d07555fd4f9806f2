"""The service around the API: readiness, keys, ids, limits, metrics, shutdown."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.server import RouterServer
from tests.router.router_clients import openai_client
from tests.waiting import wait_until

BODY = {"prompt": "the quick brown fox", "max_tokens": 3}


def test_starting(make_router):
    router = make_router()
    assert router.http.get("/health").status_code == 200
    ready = router.http.get("/ready")
    assert (ready.status_code, "starting" in ready.json()["reason"]) == (503, True)
    for path in ("/v1/completions", "/tokenize"):
        response = router.http.post(path, json=BODY)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "service_unavailable_error"
        assert response.headers["retry-after"]
    router.add_worker()
    assert router.http.get("/ready").status_code == 200
    assert router.http.post("/v1/completions", json=BODY).status_code == 200


def test_no_disaggregation(make_router):
    router = make_router(disaggregation=False)
    prefill, decode = router.add_worker("prefill-0", "prefill"), router.add_worker()
    assert router.http.post("/v1/completions", json=BODY).status_code == 200
    assert (len(prefill.generated), len(decode.generated)) == (0, 1)


def test_models(router):
    with openai_client(router.url) as client:
        (model,) = client.models.list().data
        assert (model.id, model.object, model.owned_by, model.max_model_len) == (
            "test-model",
            "model",
            "tandem",
            512,
        )
        assert client.models.retrieve("test-model").id == "test-model"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_served_model_names(make_router):
    router = make_router(served_model_name="org/other, gpt-4, org/other")
    router.add_worker()
    assert [card["id"] for card in router.http.get("/v1/models").json()["data"]] == ["org/other", "gpt-4"]
    for name in ("org/other", "gpt-4"):
        assert router.http.get(f"/v1/models/{name}").json()["id"] == name
        answer = router.http.post("/v1/completions", json={**BODY, "model": name})
        assert answer.json()["model"] == "org/other"
    assert router.http.post("/v1/completions", json={**BODY, "model": "test-model"}).status_code == 404


def test_a_root_path_may_be_in_requests(make_router):
    router = make_router(root_path="/llm")
    router.add_worker()
    for prefix in ("", "/llm"):
        assert router.http.post(f"{prefix}/v1/completions", json=BODY).status_code == 200
        assert router.http.post(f"{prefix}/v1/messages", json={}).json()["type"] == "error"
    assert router.http.get("/llmx/v1/models").status_code == 404
    assert router.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    page = router.http.get("/llm/", headers={"accept": "text/html"}).text
    assert 'href="docs"' in page and 'href="/' not in page and 'src="/' not in page


def test_tokenize_and_detokenize(router):
    tokenizer = router.server.state.tokenizer
    answer = router.http.post("/tokenize", json={"prompt": "naïve 🙂", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("naïve 🙂")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert len(answer["token_strs"]) == answer["count"]
    text = router.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert text == {"prompt": "naïve 🙂"}
    chat = router.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["tokens"] == tokenizer.encode("<user>hi\n<assistant>")
    assert chat["token_strs"] is None
    assert router.http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_version(router):
    assert set(router.http.get("/version").json()) == {"version"}


def test_unknown_path_and_method(router):
    response = router.http.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    for method, path in [("GET", "/v1/completions"), ("POST", "/health"), ("DELETE", "/v1/models")]:
        response = router.http.request(method, path)
        assert response.status_code == 405
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.headers["allow"]
        assert response.headers["x-request-id"]


def test_head_is_get_without_the_body(router):
    for path in ("/health", "/v1/models", "/docs"):
        head, whole = router.http.head(path), router.http.get(path)
        assert (head.status_code, head.content) == (200, b"") and whole.content
        assert head.headers["content-length"] == str(len(whole.content))
    assert router.http.get("/health").json() == {"status": "ok"}, "on the same connection"


@pytest.mark.parametrize(
    ("query", "field", "limit"),
    [
        ("/decisions?limit=0", "limit", "greater than or equal to 1"),
        ("/decisions?limit=" + "9" * 5000, "limit", ""),
        ("/requests?limit=1001", "limit", "less than or equal to 1000"),
        ("/requests?limit=many", "limit", "valid integer"),
        ("/doctor?seconds=0", "seconds", "greater than 0"),
        ("/doctor?seconds=nan", "seconds", "finite number"),
    ],
)
def test_bad_parameters_are_named_with_their_limits(router, query, field, limit):
    answer = router.http.get(query)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
    assert error["message"].startswith(f"{field}: ") and limit in error["message"]


def test_request_id(router):
    post = router.http.post
    given = post("/v1/completions", json=BODY, headers={"x-request-id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    assert given.json()["id"] == "cmpl-abc-123"
    made = [post("/v1/completions", json=BODY).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    for bad in ("x" * 129, "with space", "new\tline", ""):
        assert (
            post("/v1/completions", json=BODY, headers={"x-request-id": bad}).headers["x-request-id"] != bad
        )
    failed = post("/v1/completions", json={}, headers={"x-request-id": "abc-123"})
    assert (failed.status_code, failed.headers["x-request-id"]) == (400, "abc-123")
    assert router.http.get("/nothing", headers={"x-request-id": "q"}).headers["x-request-id"] == "q"
    body = {**BODY, "stream": True}
    streamed = post("/v1/completions", json=body, headers={"x-request-id": "s"})
    assert streamed.headers["x-request-id"] == "s"


def test_api_key(make_router):
    router = make_router(api_key="secret")
    router.add_worker()
    for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        for method, path in (("POST", "/tokenize"), ("GET", "/v1/models"), ("GET", "/workers")):
            response = router.http.request(method, path, headers=header)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert router.http.get(path).status_code == 200
    with openai_client(router.url, "secret") as client:
        assert client.completions.create(model="test-model", **BODY).usage.completion_tokens == 3


def test_chunked_body(router):
    response = router.http.post(
        "/v1/completions", content=iter([b'{"prompt": "he', b'llo", "max_tokens": 2}'])
    )
    assert response.json()["usage"]["completion_tokens"] == 2


def test_expected_workers_are_listed(make_router):
    router = make_router()
    router.add_worker("decode-0")
    router.server.expect({"decode-0": "decode", "decode-1": "decode", "draft-0": "draft"})
    found = router.http.get("/workers").json()
    assert [worker["id"] for worker in found["workers"]] == ["decode-0"]
    assert found["awaited"] == [{"id": "decode-1", "role": "decode"}, {"id": "draft-0", "role": "draft"}]


def test_workers(router):
    workers = {worker["id"]: worker for worker in router.http.get("/workers").json()["workers"]}
    assert {worker["role"] for worker in workers.values()} == {"prefill", "decode"}
    decode = workers["decode-0"]
    assert (decode["lifecycle"], decode["total_blocks"], decode["kv_usage"]) == ("ready", 100, 0.1)
    assert decode["start_up"] == {"attention": "fake"}
    assert (decode["host"], decode["pid"]) == ("a-machine", 4711)
    assert workers["prefill-0"]["transports"] == {"decode-0": "shm"}


def test_metrics(make_router):
    router = make_router()
    counters = {
        'spec_decode_num_drafts_total{method="ngram"}': 5.0,
        "spec_decode_num_drafts_total{method=suffix}": 7.0,
        'spec_decode_num_drafts_total{kind="odd"}': 8.0,
        "handoffs_total": 2.0,
        'handoffs_total{method="odd"}': 8.0,
        "kv_host_blocks": 3.0,
        "made_up_total": 1.0,
        "queue depth!": 1.0,
    }
    router.add_worker(counters=counters)
    assert router.http.post("/v1/completions", json=BODY).status_code == 200
    assert router.http.post("/v1/completions", json={}).status_code == 400
    response = router.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()

    def value(name: str) -> float:
        (line,) = [line for line in lines if line.startswith(name)]
        return float(line.rsplit(" ", 1)[1])

    worker = 'model_name="test-model",role="decode",worker="decode-0"'
    assert value("tandem_prompt_tokens_total{") >= 4
    assert value("tandem_generation_tokens_total{") == 3
    assert value('tandem_request_success_total{finished_reason="length"') == 1
    assert value('tandem_http_responses_total{model_name="test-model",status="400"') == 1
    assert value("tandem_inter_token_latency_seconds_count{") == 2
    once = ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency")
    for name in (*once, "request_queue_time", "request_prefill_time"):
        assert value(f"tandem_{name}_seconds_count{{") == 1
    for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total"):
        assert value(f"tandem_{name}{{") == 0
    assert value("tandem_kv_cache_usage_perc{") == pytest.approx(0.1)
    assert value("tandem_prefix_cache_queries_total{") == 7
    assert value("tandem_prefix_cache_hits_total{") == 3
    assert value(f'tandem_spec_decode_num_drafts_total{{method="ngram",{worker}}}') == 5
    assert value(f'tandem_spec_decode_num_drafts_total{{method="suffix",{worker}}}') == 7
    assert value(f"tandem_handoffs_total{{{worker}}}") == 2
    assert value(f"tandem_kv_host_blocks{{{worker}}}") == 3
    assert "# TYPE tandem_kv_host_blocks gauge" in lines
    for stranger in ("queue depth", "made_up", "odd"):
        assert stranger not in response.text


def test_draining(make_router):
    router = make_router(shutdown_timeout=60)
    worker = router.add_worker(stall_after=20)
    with ThreadPoolExecutor(1) as pool:
        body = {**BODY, "max_tokens": 40}
        running = pool.submit(httpx.post, router.url + "/v1/completions", json=body, timeout=20)
        wait_until(lambda: worker.jobs)
        router.server.stop()
        wait_until(lambda: router.server.state.is_draining)
        ready = router.http.get("/ready")
        assert (ready.status_code, "shutting down" in ready.json()["reason"]) == (503, True)
        assert router.http.post("/v1/completions", json=BODY).status_code == 503
        assert router.http.get("/health").status_code == 200
        worker.stall_after = 40
        answer = running.result(20)
    assert answer.json()["usage"]["completion_tokens"] == 40
    router.thread.join(20)
    assert not router.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(router.url + "/health")


@pytest.mark.parametrize(("timeout", "stops"), [(0.2, 1), (1000, 2)], ids=["the timeout", "a second stop"])
def test_running_requests_are_ended_by(timeout, stops, make_router):
    router = make_router(shutdown_timeout=timeout)
    worker = router.add_worker()
    worker.hold.set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, router.url + "/v1/completions", json=BODY, timeout=20)
        wait_until(lambda: worker.jobs)
        for _ in range(stops):
            router.server.stop()
        answer = running.result(20)
    assert answer.status_code == 503
    router.thread.join(20)
    assert not router.thread.is_alive()


def test_signals(model_folder):
    """SIGTERM drains and ends the process; nothing is printed."""
    code = (
        "from protocol.config import ServeConfig\n"
        "from messaging.sockets import ClusterKeys\n"
        "from router.server import RouterServer\n"
        f"config = ServeConfig(model={str(model_folder)!r}, port=0, tool_call_parser='none')\n"
        "server = RouterServer(config, ClusterKeys.generate())\n"
        "server.run(lambda: print(server.port, flush=True))\n"
        "print('drained:', server.state.is_draining)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    port = int(process.stdout.readline())
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
    process.terminate()
    output, errors = process.communicate(timeout=20)
    assert (output, errors, process.returncode) == ("drained: True\n", "", 0)


def test_stop_before_run_is_not_lost(model_folder):
    server = RouterServer(ServeConfig(model=str(model_folder), port=0), ClusterKeys.generate())
    server.stop()
    thread = threading.Thread(target=server.run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_port_in_use(router, model_folder):
    with pytest.raises(ConfigError, match="--port"):
        RouterServer(ServeConfig(model=str(model_folder), port=router.server.port), ClusterKeys.generate())


def test_a_crash_in_a_handler_is_a_500(make_router, monkeypatch):
    router = make_router()
    router.add_worker()
    monkeypatch.setattr(router.server.state.tokenizer, "encode_prompt", None)
    response = router.http.post("/v1/completions", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert response.headers["x-request-id"]
