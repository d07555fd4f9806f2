"""`/`, `/docs` and `/openapi.json` are complete, valid, and load nothing from the network."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import msgspec
import pytest

from router import openai_types
from router.anthropic import request as anthropic
from router.errors import ErrorBody, ErrorDetail
from router.pooling import EmbeddingBody, RerankBody, ScoreBody
from router.responses import body as responses

STORED = "/v1/responses/{response_id}"
OPEN = {"/", "/docs", "/openapi.json", "/health", "/ready", "/version", "/metrics", "/page/{name}"}
"""Endpoints that need no key."""
NEED_NO_BODY = {"/workers/{worker_id}/drain": 404, "/restart": 409}
"""Endpoints that need no body, with the status without such a worker or without a launcher."""
BASES = (
    openai_types.GenerationBody,
    openai_types.SamplingBody,
    openai_types.PoolingBody,
    openai_types._SamplingFields,
)
BODIES: list[type[msgspec.Struct]] = [
    *(EmbeddingBody, RerankBody, ScoreBody),
    *(
        each
        for module in (openai_types, responses, anthropic)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
        if each not in BASES
    ),
]
HTML = {"accept": "text/html,application/xhtml+xml"}


@pytest.fixture(scope="module")
def document(router) -> dict[str, Any]:
    return router.http.get("/openapi.json").json()


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        found = [value["$ref"]] if "$ref" in value else []
        return found + [each for item in value.values() for each in references(item)]
    return [each for item in value for each in references(item)] if isinstance(value, list) else []


def test_every_endpoint_is_described_and_exists(router, document):
    assert document["openapi"] == "3.1.0"
    assert len(document["paths"]) > 30 and set(document["paths"]) > OPEN
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"].endswith(".") and operation["responses"]["200"]["description"]
            named = path.replace("{model_id}", "test-model").replace("{name}", "page.js")
            named = named.replace("/doctor", "/doctor?seconds=0.1")
            answer = router.http.request(method, named)
            is_stored = path.startswith(STORED)
            refusal = 404 if is_stored else NEED_NO_BODY.get(path, 400)
            assert answer.status_code == (200 if method == "get" and not is_stored else refusal)
            assert ("requestBody" in operation) == (method == "post" and not is_stored)


def test_the_schemas_are_valid_and_say_what_is_accepted(document):
    schemas = document["components"]["schemas"]
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator({**document, "$ref": "#/components/schemas/ChatBody"})
    assert validator.is_valid({"messages": [{"role": "user", "content": "x"}], "stop": ["a"], "top_p": None})
    assert not validator.is_valid({"messages": [{"role": "user", "content": 5}]})
    assert not validator.is_valid({"messages": [], "stop": ["x"] * 65})
    assert not validator.is_valid({"messages": [], "temperature": "hot"})


@pytest.mark.parametrize("body", [*BODIES, ErrorBody, ErrorDetail])
def test_every_field_of_the_typed_bodies_is_described(document, body):
    schema = document["components"]["schemas"][body.__name__]
    assert schema["description"]
    assert list(schema["properties"]) == list(body.__struct_fields__)
    if body in BODIES:
        assert all("description" in field for field in schema["properties"].values())


def test_only_endpoints_that_need_the_key_say_so(make_router, document):
    assert "security" not in document["paths"]["/v1/completions"]["post"]
    paths = make_router(api_key="secret").http.get("/openapi.json").json()["paths"]
    protected = {
        path for path, methods in paths.items() if all("security" in each for each in methods.values())
    }
    assert protected == set(paths) - OPEN


def test_the_pages_load_nothing_and_docs_list_every_endpoint(router, document):
    docs, index = (router.http.get(path, headers=HTML) for path in ("/docs", "/"))
    for page in (docs, index):
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"].replace(
            "style-src 'unsafe-inline'", ""
        )
        assert not re.search(r"<script(?! type=\"module\" src=\"page/)|@import|https?://(?!127)", page.text)
        assert all(found.startswith("page/") for found in re.findall(r'src="([^"]*)"', page.text))
    assert "<script" not in docs.text and "unsafe" not in index.headers["content-security-policy"]
    for path in document["paths"]:
        assert f"<code>{path}</code>" in docs.text
    for name in {name for body in BODIES for name in body.__struct_fields__}:
        assert f"<code>{name}</code>" in docs.text
    anchors = set(re.findall(r' id="([^"]+)"', docs.text))
    links = re.findall(r'href="#([^"]+)"', docs.text)
    assert links and set(links) <= anchors


def test_the_pages_modules_exist_and_load_nothing_from_elsewhere(router):
    """Its modules import only each other, and other files are not served."""
    index = router.http.get("/", headers=HTML).text
    left = [path.removeprefix("page/") for path in re.findall(r'(?:src|href)="(page/[^"]+)"', index)]
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    seen: set[str] = set()
    while left:
        name = left.pop()
        answer = router.http.get(f"/page/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        assert answer.headers["x-content-type-options"] == "nosniff"
        allowed = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|@import|url\(|innerHTML|insertAdjacent|document\.write|eval", allowed
        )
        seen.add(name)
        left += [each for each in re.findall(r'from "\./([^"]+)"', answer.text) if each not in seen]
    assert len(seen) > 8
    for name in ("index.html", "docs.html", "..%2fpages.py", "../pages.py", "nothing.js", ""):
        assert router.http.get(f"/page/{name}").status_code == 404, name


def test_the_root_describes_the_server(router):
    answer = router.http.get("/").json()
    assert (answer["name"], answer["model"]) == ("tandem", "test-model")
    for name in ("docs", "openapi", "workers", "metrics"):
        assert router.http.get(answer[name]).status_code == 200
    assert "test-model" in router.http.get("/", headers=HTML).text
