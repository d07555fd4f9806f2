"""`openai-agents`: an agent that calls its tool, over the responses and the chat API."""

from typing import Literal

import agents
import openai
from common import API

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=API, api_key="none")
called = []


@agents.function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather."""
    called.append(city)
    return "rain"


for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
    agent = agents.Agent(
        name="weather",
        tools=[weather],
        model=kind("model", client),
        model_settings=agents.ModelSettings(tool_choice="required", max_tokens=100),
        tool_use_behavior="stop_on_first_tool",
    )
    assert agents.Runner.run_sync(agent, "Is it raining?").final_output == "rain"
assert len(called) == 2
