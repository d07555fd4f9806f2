"""`llama-index` with its class for OpenAI-compatible servers."""

from answers import Event, Weather
from common import API
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: str) -> str:
    """Tell the weather."""
    return city


llm = OpenAILike(
    model="model",
    api_base=API,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=512,
    max_tokens=150,
    max_retries=0,
    additional_kwargs={"seed": 1},
)
assert llm.complete("Hello", max_tokens=8).text
assert [each.delta for each in llm.stream_complete("Hello", max_tokens=8)]
assert isinstance(llm.as_structured_llm(Event).complete("When?").raw, Event)
tool = FunctionTool.from_defaults(weather, fn_schema=Weather)
calls = llm.get_tool_calls_from_response(
    llm.chat_with_tools([tool], user_msg="Is it raining?", tool_required=True)
)
assert Weather(**calls[0].tool_kwargs)
