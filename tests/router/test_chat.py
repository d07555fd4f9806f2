"""`/v1/chat/completions` and the chat templates."""

from __future__ import annotations

import pytest

from protocol.errors import InvalidRequestError
from router.text.chat_template import ChatTemplate
from tests.router.scripted import Scripted

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is a fox?"}]
RENDERED = "<system>be brief\n<user>what is a fox?\n<assistant>"


@pytest.fixture
def chat(client):
    def call(messages=MESSAGES, **options):
        return client.chat.completions.create(model="test-model", messages=messages, **options)

    return call


def test_answer(chat, tokenizer):
    answer = chat(max_tokens=5)
    prompt_ids = tokenizer.encode(RENDERED, add_special_tokens=False)
    choice = answer.choices[0]
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content == tokenizer.decode(prompt_ids[:5])
    assert answer.usage.prompt_tokens == len(prompt_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 5


def test_stream(chat):
    whole = chat(max_completion_tokens=9).choices[0].message.content
    options = {"n": 3, "max_completion_tokens": 9, "stream_options": {"include_usage": True}}
    *chunks, last = chat(stream=True, **options)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(3):
        first, *others = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert "".join(choice.delta.content for choice in others) == whole
        assert others[-1].finish_reason == "length"
    assert last.choices == []
    assert last.usage.completion_tokens == 27


def test_default_max_tokens_fills_the_context(chat):
    usage = chat(stop="never").usage
    assert usage.total_tokens == 512


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(chat, tokenizer, stream):
    answer = chat(max_tokens=4, logprobs=True, top_logprobs=2, stream=stream)
    parts = list(answer) if stream else [answer]
    content = [entry for part in parts for c in part.choices if c.logprobs for entry in c.logprobs.content]
    prompt_ids = tokenizer.encode(RENDERED, add_special_tokens=False)
    assert [entry.token for entry in content] == [tokenizer.decode([t]) for t in prompt_ids[:4]]
    assert [bytes(entry.bytes) for entry in content] == [tokenizer.token_bytes(t) for t in prompt_ids[:4]]
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].top_logprobs[0].logprob >= content[0].top_logprobs[1].logprob


def test_logprobs_without_top(chat):
    content = chat(max_tokens=2, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in content] == [[], []]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_and_usage_in_each_chunk(chat, tokenizer, stream):
    options = {"include_usage": True, "continuous_usage_stats": True}
    extra = {"stream_options": options} if stream else {}
    answer = chat(max_tokens=3, extra_body={"return_token_ids": True}, stream=stream, **extra)
    parts = list(answer) if stream else [answer]
    prompt_ids = tokenizer.encode(RENDERED, add_special_tokens=False)
    assert parts[0].prompt_token_ids == prompt_ids
    choices = [choice for part in parts for choice in part.choices]
    token_ids = [token_id for choice in choices for token_id in getattr(choice, "token_ids", None) or []]
    assert token_ids == prompt_ids[:3]
    assert all(part.usage.prompt_tokens == len(prompt_ids) for part in parts)


def test_prompt_logprobs(chat):
    answer = chat(max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None


def test_content_parts_and_developer(chat, tokenizer):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    expected = tokenizer.encode("<system>be brief\n<user>one\ntwo\n<assistant>", add_special_tokens=False)
    assert chat(messages, max_tokens=1).usage.prompt_tokens == len(expected)


def test_continue_final_message(chat, tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The fox"}]
    answer = chat(messages, max_tokens=1, extra_body={"continue_final_message": True})
    expected = tokenizer.encode("<user>hi\n<assistant>The fox", add_special_tokens=False)
    assert answer.usage.prompt_tokens == len(expected)


def test_chat_template_of_the_configuration(make_router, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}")
    router = make_router(chat_template=str(template))
    router.add_worker()
    body = {"messages": [{"role": "user", "content": "abc"}], "chat_template_kwargs": {"extra": "xyz"}}
    answer = router.http.post("/tokenize", json=body).json()
    assert answer["tokens"] == router.server.state.tokenizer.encode("abcxyz")


BARE = {
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 2}, "messages"),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 2}, "input"),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 2}, "messages"),
    "/tokenize": ({"messages": MESSAGES}, "messages"),
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Write a model without a chat template."""
    scripted = Scripted(tmp_path_factory.mktemp("models") / "bare", None)
    yield scripted
    scripted.close()


@pytest.mark.parametrize("path", BARE)
def test_a_missing_template_is_named(bare, path):
    body, field = BARE[path]
    answer = bare.router.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert "no chat template" in error["message"] and "--chat-template" in error["message"]


def test_without_a_template_other_endpoints_work(bare):
    assert bare.client.completions.create(model="bare", prompt="x", max_tokens=2).choices
    assert bare.router.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
    (card,) = bare.client.models.list().data
    expected = {"completions": True, "chat_completions": False, "responses": False, "messages": False}
    assert expected.items() <= card.capabilities.items()


def test_a_message_with_only_reasoning_is_accepted(chat):
    """A client puts it together from a stream that was cut off during the reasoning."""
    thought = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    answer = chat([*MESSAGES, thought, MESSAGES[1]], max_tokens=1)
    assert answer.usage.prompt_tokens


@pytest.mark.parametrize("refused", range(4))
def test_a_templates_refusal_is_named(refused):
    source = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}"
    chat = [{"role": "tool" if index >= refused else "user", "content": "Hi"} for index in range(5)]
    with pytest.raises(InvalidRequestError, match=rf"messages\[{refused}\]: .*no tools"):
        ChatTemplate(source, {}).render(chat)


@pytest.mark.parametrize(
    "expression", ["''.__class__.__mro__", "messages.append(1)", "cycler.__init__.__globals__"]
)
def test_template_sandbox(expression):
    template = ChatTemplate("{{ " + expression + " }}", {})
    with pytest.raises(InvalidRequestError):
        template.render(MESSAGES)


def test_templates_render_as_in_transformers():
    """Loop controls, tojson, generation blocks, trimming and special tokens behave as in Transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = """{{ bos_token }}{% for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {% generation %}[{{ m.role }}] {{ m | tojson }}{% endgeneration %}

{% endfor %}
{%- if add_generation_prompt %}>>{% endif %}"""
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES)
    theirs, _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ours == theirs[0]
