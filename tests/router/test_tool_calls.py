"""Tool calls and reasoning through the API, called by the `openai` client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from router.parsing.formats import tool_format
from router.parsing.reasoning import THINK
from tests.router.parsing.test_parsing import in_form
from tests.router.scripted import ASK, HERMES, NOW, PARIS, WEATHER, Scripted
from tests.router.templates.test_chat_templates import source_of

HARMONY = (
    "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant"
    "{# <|channel|> #}"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
PLACED_AGAIN = "tandem_requests_placed_again_total"


def functions(message: dict) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@pytest.mark.parametrize("stream", [False, True])
def test_calls(hermes, stream):
    says = f"<think>\nHm.\n</think>\n\nI look.\n{WEATHER}\n{NOW}"
    message, finish_reason = hermes.message(says, stream, tools=TOOLS)
    assert (message["role"], message["content"], finish_reason) == ("assistant", "I look.", "tool_calls")
    assert message["reasoning_content"] == "Hm."
    assert functions(message) == [("get_weather", PARIS), ("now", "{}")]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
    assert hermes.prompt.startswith(json.dumps(TOOLS))
    answer = hermes.ask(WEATHER, tools=TOOLS, stream=stream)
    if stream:
        assert all([chunk.choices[0].delta.to_dict() for chunk in answer][:-1]), "no chunk is empty"
    else:
        assert answer.choices[0].message.content is None


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_or_none(hermes, stream):
    message, _ = hermes.message(WEATHER + NOW + "Done.", stream, tools=TOOLS, parallel_tool_calls=False)
    assert functions(message) == [("get_weather", PARIS)]
    message, finish_reason = hermes.message("It is <dry> \n", stream, tools=TOOLS)
    assert (message["content"], finish_reason) == ("It is <dry> \n", "stop")
    assert "tool_calls" not in message


STOPPED = {"Paris": ("stop", '{"city": "'), "</tool_call>": ("tool_calls", PARIS), "weather": ("stop", None)}
"""Stop strings within a call: the finish reason, and the arguments if the call has begun."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "expected"), STOPPED.items(), ids=STOPPED)
def test_a_call_cut_by_a_stop_string_is_not_offered_to_run(hermes, stop, expected, stream):
    message, finish_reason = hermes.message(f"So.{WEATHER}", stream, tools=TOOLS, stop=[stop])
    arguments = functions(message)[0][1] if "tool_calls" in message else None
    assert (message["content"], finish_reason, arguments) == ("So.", *expected)


@pytest.mark.parametrize("options", [{"tools": TOOLS, "tool_choice": "none"}, {}])
def test_without_tools_calls_are_content(hermes, options):
    message, finish_reason = hermes.message(WEATHER, False, **options)
    assert (message["content"], finish_reason) == (WEATHER, "stop")
    assert hermes.prompt.startswith("<user>")


def test_without_thinking(hermes):
    message, _ = hermes.message(
        "Yes.", False, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert message["content"] == "Yes." and "reasoning_content" not in message
    assert hermes.prompt.endswith("<think></think>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [11, 12, 20])
def test_a_budget_ends_the_reasoning(hermes, stream, budget):
    """At any step boundary: tokens beyond the budget are dropped, and the answer follows the end mark."""
    hermes.worker.generated.clear()
    num_ended = hermes.router.metric(PLACED_AGAIN, reason="thinking")
    options = {"thinking_token_budget": budget, "return_token_ids": True}
    message, finish_reason = hermes.message(
        "<think>" + " fox" * 40, stream, max_tokens=60, logprobs=True, extra_body=options
    )
    first, second = hermes.worker.generated
    assert hermes.router.metric(PLACED_AGAIN, reason="thinking") == num_ended + 1
    end = hermes.tokenizer.encode("\n</think>\n\n")
    said = hermes.tokenizer.encode("<think>" + " fox" * 40)
    assert first.output_token_ids == [] and second.output_token_ids == said[:budget] + end
    assert (
        message["reasoning_content"] == hermes.tokenizer.decode(said[:budget]).removeprefix("<think>").strip()
    )
    assert message["content"] == hermes.tokenizer.decode(said[budget + len(end) :]).lstrip()
    assert finish_reason == "stop"


def test_a_budget_that_is_not_reached_changes_nothing(hermes):
    for says in ("<think>Hm.</think>Yes" + " and more" * 9, "No thought at all" + " and more" * 9):
        hermes.worker.generated.clear()
        message, _ = hermes.message(says, False, extra_body={"thinking_token_budget": 30})
        assert message["content"] == says.removeprefix("<think>Hm.</think>")
        assert len(hermes.worker.generated) == 1


def test_a_budget_at_the_limit_of_tokens(hermes):
    options = {"extra_body": {"thinking_token_budget": 10}, "max_tokens": 12}
    answer = hermes.ask("<think>" + " fox" * 40, **options)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 12)


def test_a_conversation_with_calls(hermes):
    message, _ = hermes.message(f"<think>Hm.</think>{WEATHER}", False, tools=TOOLS)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    answer, _ = hermes.message("It rains.", False, tools=TOOLS, messages=[*ASK, message, result])
    assert answer["content"] == "It rains."
    assert hermes.prompt == (
        f"{json.dumps(TOOLS)}<user>{ASK[0]['content']}\n<assistant>Hm.<tool_call>{PARIS}</tool_call>\n"
        "<tool>rain\n<assistant>"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_with_details(hermes, stream):
    """Token ids include tokens whose text is not decided yet."""
    hermes.says = f"A.{WEATHER}"
    options = {"n": 2, "logprobs": True, "extra_body": {"return_token_ids": True}}
    answer = hermes.ask(hermes.says, tools=TOOLS, stream=stream, **options)
    token_ids: dict[int, list[int]] = {0: [], 1: []}
    logprobs = {0: 0, 1: 0}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            token_ids[choice.index] += getattr(choice, "token_ids", None) or []
            logprobs[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    expected = [*hermes.tokenizer.encode(hermes.says), 0]
    assert token_ids == {0: expected, 1: expected}
    assert logprobs == {0: len(expected), 1: len(expected)}


class Weather(BaseModel):
    city: str


def test_the_clients_own_ways_to_parse(hermes):
    """They require strict functions, and check the order of events."""
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    hermes.says = f"I look. {WEATHER}"
    asked = {"model": hermes.router.server.config.model_name, "messages": ASK, "tools": tools}
    (call,) = hermes.client.chat.completions.parse(**asked).choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Paris 🙂")
    with hermes.client.chat.completions.stream(**asked) as stream:
        events = list(stream)
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.arguments, done.parsed_arguments) == (
        "get_weather",
        PARIS,
        Weather(city="Paris 🙂"),
    )
    assert stream.get_final_completion().choices[0].message.content == "I look."


STRICT = [TOOLS[0], {"type": "function", "function": {"name": "now", "strict": True}}]
NAMED = {"type": "function", "function": {"name": "now"}}
BOTH = f"{NOW}\n{WEATHER}"


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "takes", "refuses"),
    [
        (TOOLS, "required", None, [WEATHER, f"<think>Hm.</think>\n{NOW}"], ["Yes.", BOTH]),
        (TOOLS, "required", False, [WEATHER, NOW], ["Yes.", BOTH]),
        (TOOLS, "required", True, [WEATHER, BOTH], ["Yes.", f"Yes.{NOW}"]),
        (TOOLS, NAMED, True, [NOW], ["Yes.", WEATHER, f"{NOW}\n{NOW}"]),
        (STRICT, "auto", None, ["Yes.", f"I look. {NOW}", BOTH], [NOW.replace("{}", '{"a": 1}')]),
        (STRICT, "auto", False, ["Yes.", f"I look. {NOW}"], [BOTH]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_becomes_the_requests_grammar(
    hermes, tools, choice, parallel, takes, refuses, stream
):
    options = {} if parallel is None else {"parallel_tool_calls": parallel}
    message, finish_reason = hermes.message(NOW, stream, tools=tools, tool_choice=choice, **options)
    assert functions(message) == [("now", "{}")] and finish_reason == "tool_calls"
    grammar = hermes.worker.generated[-1].sampling.grammar
    assert all(takes_whole(hermes, grammar, text) for text in takes)
    assert not any(takes_whole(hermes, grammar, text) for text in refuses)


@pytest.mark.parametrize("parallel", [None, True])
def test_a_response_has_one_call_unless_more_are_asked_for(hermes, parallel):
    """A call is required here."""
    hermes.says = BOTH
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"model": hermes.router.server.config.model_name, "input": "?", "tools": tools}
    body |= {"tool_choice": "required", "parallel_tool_calls": parallel}
    answer = hermes.router.http.post("/v1/responses", json=body).json()
    grammar = hermes.worker.generated[-1].sampling.grammar
    assert takes_whole(hermes, grammar, NOW) and takes_whole(hermes, grammar, BOTH) is bool(parallel)
    assert answer["parallel_tool_calls"] is bool(parallel)
    assert [call["name"] for call in answer["output"]] == (["now", "get_weather"] if parallel else ["now"])


def takes_whole(hermes, grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(hermes.tokenizer.as_json().decode()), grammar, log_level=0)
    token_ids = hermes.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_a_structured_answer_follows_its_reasoning(hermes):
    hermes.ask("<think>1</think>{}", response_format={"type": "json_object"})
    grammar = hermes.worker.generated[-1].sampling.grammar
    assert takes_whole(hermes, grammar, "{}") and takes_whole(hermes, grammar, "<think>[1</think>\n\n{}")
    assert not takes_whole(hermes, grammar, "<think>{}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_structured_answer_has_no_calls(hermes, stream):
    wanted = {"structured_outputs": {"choice": [NOW]}}
    message, finish_reason = hermes.message(NOW, stream, tools=TOOLS, extra_body=wanted)
    assert (message["content"], finish_reason) == (NOW, "stop") and "tool_calls" not in message


UNSUPPORTED = {"name": "f", "strict": True, "parameters": {"unevaluatedProperties": False}}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": STRICT, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": STRICT, "tool_choice": "required", "extra_body": {"min_tokens": 2}}, "min_tokens"),
        ({"tools": [{"type": "function", "function": UNSUPPORTED}]}, "tools"),
    ],
    ids=["two grammars", "a least length", "an unsupported keyword"],
)
def test_impossible_grammars_are_refused(hermes, options, field):
    with pytest.raises(openai.BadRequestError) as refused:
        hermes.ask(NOW, **options)
    assert refused.value.param == field


@pytest.mark.parametrize("stream", [False, True])
def test_no_part_of_a_mark_is_content(hermes, stream):
    """The limit cuts before the call, in it, and in the mark that ends it."""
    says = f"<think>Hm.</think>{WEATHER}"
    for room in range(1, len(hermes.tokenizer.encode(says)) + 1, 4):
        message, finish_reason = hermes.message(says, stream, tools=TOOLS, max_tokens=room)
        assert finish_reason == "length"
        assert message["content"] in (None, "", "<"), message
        assert message.get("reasoning_content", "") in ("", "H", "Hm", "Hm.", "Hm.<"), message


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Write a model whose template leaves tools out."""
    scripted = Scripted(tmp_path_factory.mktemp("models") / "plain", PLAIN)
    yield scripted
    scripted.close()


def test_tools_that_the_template_leaves_out(plain, hermes):
    """The model does not see them, and a warning tells the client."""
    num_unseen = plain.router.metric("tandem_requests_tools_unseen_total")
    for create, options in (
        (plain.client.chat.completions.with_raw_response.create, {"messages": ASK, "tools": TOOLS}),
        (
            plain.client.responses.with_raw_response.create,
            {"input": "x", "tools": [{"type": "function", "name": "now", "parameters": {}}]},
        ),
    ):
        plain.says = "No idea."
        for stream in (False, True):
            answer = create(model="plain", stream=stream, **options)
            assert answer.headers["x-warning"].startswith("tools: the model's chat template does not tell")
    assert plain.prompt == "<user>x\n<assistant>"
    assert plain.router.metric("tandem_requests_tools_unseen_total") == num_unseen + 4
    asked = plain.client.chat.completions.with_raw_response.create
    for silent in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert "x-warning" not in asked(model="plain", messages=ASK, **silent).headers
    hermes.says = "No idea."
    asked = hermes.client.chat.completions.with_raw_response.create
    assert "x-warning" not in asked(model="hermes", messages=ASK, tools=TOOLS).headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_required_call_needs_no_template(plain, choice, stream):
    message, finish_reason = plain.message(NOW, stream, tools=TOOLS, tool_choice=choice)
    assert functions(message) == [("now", "{}")] and finish_reason == "tool_calls"
    grammar = plain.worker.generated[-1].sampling.grammar
    assert takes_whole(plain, grammar, NOW) and not takes_whole(plain, grammar, "Yes.")
    called = {"type": "function", "name": "now", "parameters": {}, "strict": False}
    asked = choice if isinstance(choice, str) else {"type": "function", "name": "now"}
    (call,) = plain.client.responses.create(
        model="plain", input="x", tools=[called], tool_choice=asked
    ).output
    assert (call.type, call.name, call.arguments) == ("function_call", "now", "{}")


def test_calls_of_an_unknown_form_are_refused_unless_a_grammar_writes_them(make_scripted):
    other = make_scripted("other", "{{ tools | tojson }}<function=...>" + PLAIN)
    with pytest.raises(openai.BadRequestError, match="no known way to call them"):
        other.ask("x", tools=TOOLS)
    message, _ = other.message(NOW, False, tools=TOOLS, tool_choice="required")
    assert functions(message) == [("now", "{}")]


def test_mistrals_calls_have_short_ids(make_scripted):
    mistral = make_scripted("mistral", PLAIN, tool_call_parser="mistral")
    message, _ = mistral.message("[TOOL_CALLS]now{}", False, tools=TOOLS)
    assert functions(message) == [("now", "{}")] and len(message["tool_calls"][0]["id"]) == 9


def test_a_server_without_tools_refuses_them(make_scripted):
    none = make_scripted("none", HERMES, tool_call_parser="none")
    for choice in ("auto", "required", NAMED):
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser none"):
            none.ask("x", tools=TOOLS, tool_choice=choice)


def test_a_separate_template_for_tools(make_scripted, caplog):
    """Hermes 2 Pro has one. Without it the tools would be lost or refused."""
    templates = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": HERMES}]
    named = make_scripted("named", templates)
    message, finish_reason = named.message(NOW, False, tools=TOOLS)
    assert functions(message) == [("now", "{}")] and finish_reason == "tool_calls"
    assert named.prompt.startswith(json.dumps(TOOLS))
    tokens = named.router.http.post("/tokenize", json={"messages": ASK, "tools": TOOLS}).json()["tokens"]
    assert named.tokenizer.decode(tokens, False) == named.prompt
    named.client.responses.create(model="named", input="x", tools=[{"type": "function", "name": "now"}])
    assert '"name": "now"' in named.prompt
    message, _ = named.message(NOW, False, tools=TOOLS, tool_choice="none")
    assert message["content"] == NOW and named.prompt.startswith("<user>")
    assert named.client.models.list().data[0].capabilities["tools"]
    assert "does not tell the model of tools" not in caplog.text


def test_the_log_warns_of_a_template_that_leaves_tools_out(make_scripted, caplog):
    make_scripted("warned", PLAIN)
    assert "the model's chat template does not tell the model of tools" in caplog.text
    caplog.clear()
    make_scripted("silent", PLAIN, tool_call_parser="none")
    make_scripted("bare", None)
    assert not caplog.text


def test_a_template_for_single_calls_gets_one_call(make_scripted):
    """The template would refuse a conversation with several calls in one answer."""
    source = HERMES + "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    source += "{{ raise_exception('one call') }}{% endif %}{% endfor %}"
    single = make_scripted("single", source)
    message, _ = single.message(WEATHER + NOW, False, tools=TOOLS)
    assert functions(message) == [("get_weather", PARIS)]
    single.message(NOW, False, tools=TOOLS, tool_choice="required", parallel_tool_calls=True)
    grammar = single.worker.generated[-1].sampling.grammar
    assert takes_whole(single, grammar, NOW) and not takes_whole(single, grammar, f"{NOW}\n{NOW}")


@pytest.mark.parametrize(
    "name",
    ["tags-qwen3_coder", "tags-glm47", "tags-deepseek_v4", "calls-kimi_k2", "calls-gemma4", "calls-pythonic"],
)
def test_calls_that_are_not_in_hermes_form(make_scripted, name):
    source = source_of(name)
    tagged = make_scripted(name, source)
    calls = [("get_weather", '{"city": "Paris 🙂 </b>"}'), ("now", "{}")]
    text = in_form(tool_format("auto", source).form(source), *calls)
    prompt = tagged.router.http.post("/tokenize", json={"messages": ASK}).json()["tokens"]
    is_open = THINK.are_open(tagged.tokenizer.decode(prompt, False), None)
    said = f"Hm.</think>\n{text}" if is_open else text
    for stream, tools in ((False, TOOLS), (True, STRICT)):
        message, reason = tagged.message(said, stream, parallel_tool_calls=True, tools=tools)
        assert functions(message) == calls and reason == "tool_calls" and not message["content"]
        assert message.get("reasoning_content", "") == ("Hm." if is_open else "")
    grammar = tagged.worker.generated[-1].sampling.grammar
    assert takes_whole(tagged, grammar, said)
    assert not takes_whole(tagged, grammar, said.replace("now", "new"))
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and (ids[1] == "functions.now:0") == (name == "calls-kimi_k2")
    result = {"role": "tool", "tool_call_id": ids[0], "content": "rain"}
    tagged.message("Yes.", False, messages=[*ASK, message, result])
    assert text in tagged.prompt


def test_marks_that_are_special_tokens(make_scripted):
    scripted = make_scripted("harmony", HARMONY)
    says = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|call|>"
    )
    message, finish_reason = scripted.message(says, True, tools=TOOLS, reasoning_effort="low")
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "")
    assert (functions(message), finish_reason) == ([("now", "{}")], "tool_calls")
    assert scripted.prompt.startswith("low")


def test_capabilities(hermes, router):
    expected = {
        "embeddings": False,
        "completions": True,
        "chat_completions": True,
        "responses": True,
        "messages": True,
        "tools": True,
        "reasoning": True,
    }
    (model,) = hermes.client.models.list().data
    assert model.capabilities == expected
    (plain,) = router.http.get("/v1/models").json()["data"]
    assert plain["capabilities"] == {**expected, "tools": False, "reasoning": False}
