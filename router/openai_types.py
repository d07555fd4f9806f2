"""Request bodies, as OpenAI and vLLM define them. Fields that they lack are named in a header of the answer.

`/openapi.json` has descriptions and limits. Fields of type `Raw` stay JSON until their size was checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Raw

from protocol.fields import doc
from protocol.sampling import body_fields

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
"""Most characters of all stop strings: each token is checked at every possible start."""
MAX_BAD_WORDS = 1024
MAX_WORD_CHARACTERS = 1024
MAX_MESSAGES = 16_384
MAX_ALLOWED_TOKEN_IDS = 2**19
MAX_TOOLS = 128
MAX_METADATA = 16
MAX_ARGUMENT_BYTES = 1024 * 1024
"""Most bytes of a call's arguments in an assistant's message."""
MAX_RAW_BYTES = 64 * 1024
"""Most bytes of a field of free-form JSON."""


def _json(text: str, **schema: Any) -> Meta:
    return Meta(description=text, extra_json_schema=schema)


def absent() -> Any:
    """Return the default of a `Raw` field: empty, to differ from null."""
    return msgspec.field(default_factory=Raw)


Word = Annotated[str, Meta(min_length=1, max_length=MAX_WORD_CHARACTERS)]
CallableName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
"""The name of a function."""
Object = Annotated[Raw, _json("A JSON object.", type="object")]
Unsupported = Annotated[Raw, _json("Not supported: only a value that changes nothing is accepted.")]
ModelName = Annotated[str | None, doc("The model's name; default: the served model.")]
IgnoredText = Annotated[str | None, doc("Accepted and ignored.")]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None
CacheSalt = Annotated[
    Annotated[str, Meta(max_length=256)] | None,
    doc("Share cached prefixes only with requests of equal salt."),
]
ThinkingTokens = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    doc("Most tokens of reasoning; after that many, the reasoning is ended."),
]
ParallelCalls = Annotated[bool | None, doc("Allow several calls; default: true unless one is required.")]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MAX_METADATA),
]

_TEXT = {"type": "string"}
_OBJECT_OR_TEXT = [{"type": "object"}, _TEXT]
_TOKENS = {"type": "array", "items": {"type": "integer"}}
PROMPTS = [_TEXT, _TOKENS, {"type": "array", "items": _TEXT}, {"type": "array", "items": _TOKENS}]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed response."""

    include_usage: Annotated[bool | None, doc("Send the usage before the end.")] = None
    continuous_usage_stats: Annotated[bool | None, doc("Send the usage with each chunk.")] = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema, as OpenAI wraps it."""

    schema: Annotated[Object, _json("The JSON schema.", type="object")] = absent()
    name: IgnoredText = None
    description: IgnoredText = None
    strict: Annotated[bool | None, doc("Accepted: the answer always satisfies the schema.")] = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's structured outputs."""

    type: Annotated[str, doc("`text`, `json_object`, `json_schema` or `structural_tag`.")]
    json_schema: Annotated[JsonSchemaFormat | None, doc("With the type `json_schema`.")] = None
    structures: Annotated[
        Raw, _json("With the type `structural_tag`.", type="array", items={"type": "object"})
    ] = absent()
    triggers: Annotated[Raw, _json("With the type `structural_tag`.", type="array", items=_TEXT)] = absent()


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's structured outputs: exactly one constraint."""

    json: Annotated[Raw, _json("A JSON schema, or one as a string.", anyOf=_OBJECT_OR_TEXT)] = absent()
    regex: Annotated[str | None, doc("A regular expression that the whole answer matches.")] = None
    choice: Annotated[list[str] | None, doc("The answer is one of these.")] = None
    grammar: Annotated[str | None, doc("A context-free grammar in Lark's or GBNF's notation.")] = None
    json_object: Annotated[bool | None, doc("Any JSON object.")] = None
    structural_tag: Annotated[
        Raw,
        _json("`structures` of `begin`, `schema` and `end`, and `triggers`.", anyOf=_OBJECT_OR_TEXT),
    ] = absent()
    whitespace_pattern: Annotated[
        str | None, doc("A regular expression of the space between JSON's tokens.")
    ] = None
    disable_any_whitespace: Annotated[bool | None, doc("Accepted and ignored.")] = None


if TYPE_CHECKING:
    _SamplingFields = msgspec.Struct
else:
    _SamplingFields = msgspec.defstruct("SamplingFields", body_fields(), kw_only=True, module=__name__)


class SamplingBody(_SamplingFields, kw_only=True):
    """The fields that all generating endpoints share."""

    model: ModelName = None
    stop: Annotated[
        Word | Annotated[list[Word], Meta(max_length=MAX_STOPS)] | None, doc("Strings that end the answer.")
    ] = None
    stream: Annotated[bool | None, doc("Answer with server-sent events, token by token.")] = None
    include_stop_str_in_output: Annotated[bool | None, doc("Keep the stop string in the text.")] = None
    bad_words: Annotated[
        Annotated[list[Word], Meta(max_length=MAX_BAD_WORDS)] | None,
        doc("Strings that are never generated."),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[int], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] | None, doc("Generate only these.")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, doc("Leave special tokens out of the text; default: true.")
    ] = None
    priority: Annotated[Priority, doc("Lower values are scheduled first, and shed last; default: 0.")] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        doc("Keep only this many tokens at the prompt's end; -1: as many as leave room for an answer."),
    ] = None
    cache_salt: CacheSalt = None
    disaggregate: Annotated[
        bool | None,
        doc(
            "Compute the prompt on a prefill worker and decode on another, or not; default: the cheaper way."
        ),
    ] = None
    user: IgnoredText = None
    safety_identifier: IgnoredText = None
    metadata: Annotated[Object, doc("Accepted and ignored.")] = absent()
    store: Annotated[bool | None, doc("Accepted and ignored: only responses are stored.")] = None
    service_tier: Annotated[str | None, doc("Accepted and ignored: the API key has a priority.")] = None
    prompt_cache_key: Annotated[str | None, doc("Accepted and ignored: caching needs no key.")] = None
    speculative: Annotated[
        Object, _json("This request's speculation: `enabled`, `method`, `num_speculative_tokens`.")
    ] = absent()
    structured_outputs: Annotated[
        StructuredOutputs | None, doc("The constraint on the answer, in vLLM's form.")
    ] = None

    length_penalty: Unsupported = absent()
    early_stopping: Unsupported = absent()
    json_schema: Unsupported = absent()
    regex: Unsupported = absent()
    ebnf: Unsupported = absent()
    grammar: Unsupported = absent()


class GenerationBody(SamplingBody, kw_only=True):
    """The fields that completions and chat share."""

    max_tokens: Annotated[int | None, doc("Most new tokens; default: 16, in a chat all that fit.")] = None
    n: Annotated[Annotated[int, Meta(ge=1)] | None, doc("Choices for each prompt.")] = None
    stream_options: Annotated[StreamOptions | None, doc("Only with `stream`.")] = None
    prompt_logprobs: Annotated[int | None, doc("Likeliest alternatives for each token of the prompt.")] = None
    spaces_between_special_tokens: Annotated[bool | None, doc("Accepted and ignored.")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add special tokens; default: true, in a chat false.")
    ] = None
    return_token_ids: Annotated[bool | None, doc("Return the token ids of the prompt and the answer.")] = None
    return_timing: Annotated[
        bool | None,
        doc(
            "Return where the time went, as `timing`, with `stream` in the last chunk, and in each choice "
            "which text was drafted, as `spans` of `text` and `drafted`. The header `x-return-timing` does "
            "the same."
        ),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, doc("The answer's format, such as JSON or JSON of a schema.")
    ] = None

    best_of: Unsupported = absent()
    use_beam_search: Unsupported = absent()
    guided_json: Unsupported = absent()
    guided_regex: Unsupported = absent()
    guided_choice: Unsupported = absent()
    guided_grammar: Unsupported = absent()
    guided_whitespace_pattern: Unsupported = absent()
    logits_processors: Unsupported = absent()
    kv_transfer_params: Unsupported = absent()


class CompletionBody(GenerationBody, kw_only=True):
    """Continue a text."""

    prompt: Annotated[Raw, _json("A text, a list of token ids, or a list of either.", anyOf=PROMPTS)] = (
        absent()
    )
    echo: Annotated[bool | None, doc("Begin the answer with the prompt.")] = None
    logprobs: Annotated[int | None, doc("Likeliest alternatives to return for each token.")] = None

    suffix: Unsupported = absent()
    prompt_embeds: Unsupported = absent()


class PoolingBody(msgspec.Struct, kw_only=True):
    """The fields that embeddings and scores share."""

    model: ModelName = None
    user: IgnoredText = None
    truncate_prompt_tokens: Annotated[
        int | None, doc("Keep only this many tokens at each text's end; -1: as many as the model allows.")
    ] = None
    add_special_tokens: Annotated[bool | None, doc("Add special tokens; default: true.")] = None
    priority: Annotated[Priority, doc("Lower values are scheduled first.")] = None
    cache_salt: CacheSalt = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message."""

    type: Annotated[str, doc("`text`; others are not supported.")]
    text: Annotated[str | None, doc("The part's text.")] = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function's name and its arguments."""

    name: Annotated[str, doc("The function's name.")]
    arguments: Annotated[str, doc("An object as JSON text.")]


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made."""

    id: Annotated[str, doc("The id that the `tool` message with the result refers to.")]
    type: Annotated[str, doc("`function`.")] = "function"
    function: Annotated[CalledFunction, doc("The called function.")]


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by its name alone."""

    name: Annotated[str, doc("The function's name.")]


class PredictedContent(msgspec.Struct, kw_only=True):
    """A text that much of the answer may repeat."""

    type: Annotated[str, doc("`content`.")] = "content"
    content: Annotated[str | list[ContentPart], doc("The predicted text.")]


class NamedTool(msgspec.Struct, kw_only=True):
    """The tool that the answer must call."""

    type: Annotated[str, doc("`function`.")]
    function: Annotated[FunctionName, doc("The function.")]


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: Annotated[CallableName, doc("The function's name.")]
    description: Annotated[str | None, doc("Tells the model what it does and when to call it.")] = None
    parameters: Annotated[Object, _json("A JSON schema of the arguments.")] = absent()
    strict: Annotated[bool | None, doc("The arguments always satisfy the schema.")] = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may use."""

    type: Annotated[str, doc("`function`; others are not supported.")]
    function: Annotated[Function, doc("The function.")]


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: Annotated[str, doc("`system`, `developer`, `user`, `assistant` or `tool`.")]
    content: Annotated[str | list[ContentPart] | None, doc("The text; may be null with `tool_calls`.")] = None
    name: Annotated[str | None, doc("Passed to the chat template.")] = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None,
        doc("Functions that the assistant called."),
    ] = None
    tool_call_id: Annotated[str | None, doc("In a `tool` message: the id of the call it answers.")] = None
    reasoning_content: Annotated[str | None, doc("The reasoning; the chat template may show it.")] = None
    function_call: Unsupported = absent()
    audio: Unsupported = absent()


Messages = Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)]
TemplateVariables = Annotated[Object, _json("Variables for the chat template.")]


class ChatBody(GenerationBody, kw_only=True):
    """Answer messages."""

    messages: Annotated[Messages, doc("The chat so far.")]
    max_completion_tokens: Annotated[int | None, doc("Like `max_tokens`, but takes precedence.")] = None
    logprobs: Annotated[bool | None, doc("Return each token's log-probability.")] = None
    top_logprobs: Annotated[int | None, doc("Likeliest alternatives to return for each token.")] = None
    add_generation_prompt: Annotated[bool | None, doc("Begin the assistant's turn; default: true.")] = None
    continue_final_message: Annotated[bool | None, doc("Continue the last message instead.")] = None
    chat_template_kwargs: TemplateVariables = absent()

    tools: Annotated[Tools | None, doc("Functions that the model may call.")] = None
    tool_choice: Annotated[
        str | NamedTool | None,
        doc("`auto` (the default with `tools`), `none`, `required`, or the function to call."),
    ] = None
    parallel_tool_calls: ParallelCalls = None
    thinking_token_budget: ThinkingTokens = None
    reasoning_effort: Annotated[str | None, doc("Passed to the chat template.")] = None
    prediction: Annotated[PredictedContent | None, doc("A text to draft from; it changes no token.")] = None

    functions: Unsupported = absent()
    function_call: Unsupported = absent()
    modalities: Unsupported = absent()
    audio: Unsupported = absent()
    web_search_options: Unsupported = absent()
    documents: Unsupported = absent()
    chat_template: Unsupported = absent()
    include_reasoning: Unsupported = absent()
    verbosity: Unsupported = absent()
    echo: Unsupported = absent()


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Turn a text or a chat into token ids."""

    model: ModelName = None
    prompt: Annotated[str | None, doc("A text; either this or `messages` is required.")] = None
    messages: Annotated[Messages | None, doc("A chat.")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add special tokens; default: true for a prompt.")
    ] = None
    add_generation_prompt: Annotated[bool, doc("Begin the assistant's turn.")] = True
    continue_final_message: Annotated[bool, doc("Leave the last message open.")] = False
    return_token_strs: Annotated[bool | None, doc("Return each token as the vocabulary spells it.")] = None
    tools: Annotated[Tools | None, doc("Functions that the model may call in the chat.")] = None
    chat_template_kwargs: TemplateVariables = absent()


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Turn token ids into text."""

    model: ModelName = None
    tokens: Annotated[list[int], doc("At most as many as the model's context has.")]
