"""LoRA adapters at the router: names in requests, and loads on all workers."""

from __future__ import annotations

import pytest

from protocol.kv_events import CacheFormat
from protocol.requests import Adapter
from router.api_keys import add_key
from router.text.choice import Prompt
from tests.router.router_clients import eventually, lose, make_pair, post
from tests.router.several import TwoRouters

SQL = Adapter(name="sql", path="/adapters/sql", digest="1" * 32)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "new", "lora_path": "/adapters/new"}


@pytest.fixture
def router(make_router):
    return make_router(enable_lora=True, worker_timeout=10.0)


def names(router) -> list[str]:
    return [card["id"] for card in router.http.get("/v1/models").json()["data"]]


def on_loop(router, function, *arguments) -> None:
    router.server._loop.call_soon_threadsafe(function, *arguments)


def test_models_and_requests_know_the_workers_adapters(router):
    worker = router.add_worker(first_adapters=[SQL])
    base, card = router.http.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("test-model", None)
    assert (card["id"], card["parent"], card["root"]) == ("sql", "test-model", "/adapters/sql")
    assert router.http.get("/v1/models/sql").json() == card
    bodies = {"model": "sql"}, {"model": "test-model"}, {}
    answers = [post(router, max_tokens=2, **fields) for fields in bodies]
    assert [answer.json()["model"] for answer in answers] == ["sql", "test-model", "test-model"]
    assert [request.adapter for request in worker.generated] == [SQL, None, None]
    answer = post(router, model="sqll")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "this server has test-model, sql" in answer.text


def test_a_chat_a_response_and_a_tokenization_may_name_one(router):
    worker = router.add_worker(first_adapters=[SQL])
    chat = {"model": "sql", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert router.http.post("/v1/chat/completions", json=chat).json()["model"] == "sql"
    response = {"model": "sql", "input": "x", "max_output_tokens": 2}
    assert router.http.post("/v1/responses", json=response).json()["model"] == "sql"
    assert [request.adapter for request in worker.generated] == [SQL, SQL]
    assert router.http.post("/tokenize", json={"model": "sql", "prompt": "x"}).status_code == 200
    assert router.http.post("/tokenize", json={"model": "no", "prompt": "x"}).status_code == 404


def test_all_workers_load_and_unload_it(router):
    pair = make_pair(router)
    answer = router.http.post(LOAD, json=BODY)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert [worker.adapters for worker in pair] == [{"new": "a" * 32}] * 2
    assert names(router) == ["test-model", "new"]
    assert post(router, model="new", max_tokens=2).status_code == 200
    assert pair[0].generated[0].adapter == Adapter(name="new", path="/adapters/new", digest="a" * 32)
    answer = router.http.post(LOAD, json=BODY)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")
    answer = router.http.post(UNLOAD, json={"lora_name": "new"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    eventually(lambda: [worker.adapters for worker in pair] == [{}, {}])
    assert names(router) == ["test-model"]
    assert post(router, model="new").status_code == 404
    assert router.http.post(UNLOAD, json={"lora_name": "new"}).status_code == 404


@pytest.mark.parametrize("fault", ["error", "digest"])
def test_an_adapter_that_one_worker_cannot_load_is_unloaded_everywhere(router, fault):
    prefill, decode = make_pair(router)
    if fault == "error":
        decode.adapter_error = "adapter_config.json: r: must be from 1 to 64"
    else:
        decode.adapter_digest = "b" * 32
    answer = router.http.post(LOAD, json=BODY)
    reason = decode.adapter_error or "the workers' hosts have different files there"
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
    assert reason in answer.text
    eventually(lambda: prefill.adapters == decode.adapters == {})
    assert names(router) == ["test-model"]
    decode.adapter_error, decode.adapter_digest = "", "a" * 32
    assert router.http.post(LOAD, json=BODY).status_code == 200


def test_a_hanging_disk_is_not_blamed_on_the_path(router):
    worker = router.add_worker()
    worker.adapter_error, worker.adapter_error_kind = "/adapters/new: nothing came for 10 s", "timeout"
    answer = router.http.post(LOAD, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert "lora_path: /adapters/new: nothing came" in answer.text
    assert names(router) == ["test-model"]


def test_a_worker_that_dies_during_a_load_gets_the_adapter_when_it_returns(router, pool):
    prefill, decode = make_pair(router)
    decode.adapter_error = None
    answer = pool.submit(router.http.post, LOAD, json=BODY)
    eventually(lambda: prefill.adapters)
    lose(router, decode)
    assert answer.result(20).status_code == 200
    successor = router.add_worker("decode-0", "decode")
    eventually(lambda: successor.adapters == {"new": "a" * 32})


def test_a_returning_worker_gets_the_present_adapters(make_router):
    router = make_router(lora_modules={"sql": "/adapters/sql"})
    worker = router.add_worker(first_adapters=[SQL])
    router.http.post(UNLOAD, json={"lora_name": "sql"}).raise_for_status()
    router.http.post(LOAD, json=BODY).raise_for_status()
    lose(router, worker)
    successor = router.add_worker(first_adapters=[SQL])
    eventually(lambda: successor.adapters == {"new": "a" * 32})


def test_a_worker_that_does_not_answer_in_time_ends_the_attempt(make_router):
    router = make_router(enable_lora=True, request_timeout=0.2, worker_timeout=10.0)
    worker = router.add_worker()
    worker.adapter_error, worker.adapters = None, {"new": "loaded too late"}
    answer = router.http.post(LOAD, json=BODY)
    assert (answer.status_code, "1 workers have not loaded it within 0.2 s" in answer.text) == (504, True)
    eventually(lambda: worker.adapters == {})
    assert names(router) == ["test-model"]


def test_draft_workers_have_no_adapters(router):
    draft = router.add_worker("draft-0", "draft")
    router.add_worker()
    router.http.post(LOAD, json=BODY).raise_for_status()
    assert draft.adapters == {}


def test_each_adapter_has_its_own_blocks_of_a_prompt(router):
    router.add_worker(first_adapters=[SQL])
    prompt = "the quick brown fox " * 30
    state, keys = router.server.state, []
    form = CacheFormat(model="m", kv_format="f", block_size=16)
    tokens = state.tokenizer.encode(prompt, add_special_tokens=False)
    other = Adapter(name="other", path="/o", digest="2" * 32)
    alias = Adapter(name="alias", path="/elsewhere", digest=SQL.digest)
    for adapter in (None, SQL, other, alias):
        keys.append(Prompt(tokens).blocks(form, "", adapter).keys)
    assert keys[1] == keys[3]
    assert not {*keys[0]} & {*keys[1]} and not {*keys[1]} & {*keys[2]}


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"lora_name": "new"}, 400, "lora_path"),
        ({"lora_path": "/x"}, 400, "lora_name"),
        ({"lora_name": "", "lora_path": "/x"}, 400, "lora_name"),
        ({"lora_name": "x" * 257, "lora_path": "/x"}, 400, "lora_name"),
        ({"lora_name": 7, "lora_path": "/x"}, 400, "lora_name"),
        ({"lora_name": "test-model", "lora_path": "/x"}, 400, "is the model's name"),
    ],
)
def test_bad_fields_are_named(router, body, status, reason):
    router.add_worker()
    answer = router.http.post(LOAD, json=body)
    assert (answer.status_code, reason in answer.text) == (status, True), answer.text


def test_without_the_option_nothing_is_loaded(make_router):
    router = make_router()
    worker = router.add_worker()
    answer = router.http.post(LOAD, json=BODY)
    assert (answer.status_code, "--enable-lora" in answer.text) == (400, True)
    assert router.http.post(UNLOAD, json={"lora_name": "x"}).status_code == 400
    assert worker.adapters == {}


def test_before_any_worker_nothing_is_loaded(router):
    assert router.http.post(LOAD, json=BODY).status_code == 503


def test_routers_learn_of_each_others_adapters(model_folder):
    """The launcher passes changes on. An adapter that only the worker has is a dead router's."""
    begun = Adapter(name="begun", path="/adapters/begun", digest="2" * 32)
    with TwoRouters(model_folder, lora_modules={"sql": "/adapters/sql"}, worker_timeout=10) as two:
        one, other = (router.server.state.adapters for router in two.routers)
        one.publish = lambda name, adapter: on_loop(two.routers[1], other.apply, name, adapter)
        worker = two.add_worker("decode-0", first_adapters=[SQL, begun])
        two.each(lambda router: names(router) == ["test-model", "sql"])
        assert two.routers[0].http.post(LOAD, json=BODY).status_code == 200
        two.each(lambda router: names(router) == ["test-model", "sql", "new"])
        assert two.routers[0].http.post(UNLOAD, json={"lora_name": "sql"}).status_code == 200
        two.each(lambda router: names(router) == ["test-model", "new"])
        eventually(lambda: worker.adapters == {"new": "a" * 32})


def test_changes_before_a_worker_registers_apply_to_it(make_router):
    router = make_router(lora_modules={"sql": "/adapters/sql"}, router_replicas=2)
    new = Adapter(name="new", path="/adapters/new", digest="a" * 32)
    for adapter in (new, None):
        on_loop(router, router.server.state.adapters.apply, adapter.name if adapter else "sql", adapter)
    worker = router.add_worker(first_adapters=[SQL])
    eventually(lambda: worker.adapters == {"new": "a" * 32})
    assert names(router) == ["test-model", "new"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_only_operators_load_and_unload(make_router, tmp_path, path):
    file = tmp_path / "keys.yaml"
    client = add_key(file, name="client")
    router = make_router(enable_lora=True, api_key_file=str(file))
    router.add_worker()
    assert router.http.post(path, json=BODY).status_code == 401
    answer = router.http.post(path, json=BODY, headers={"authorization": f"Bearer {client}"})
    assert (answer.status_code, "for operators" in answer.text) == (403, True)
