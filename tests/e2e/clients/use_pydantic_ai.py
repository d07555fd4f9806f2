"""`pydantic-ai`: an agent with a typed answer, and one with a text answer."""

from answers import Event
from common import API
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=API, api_key="none")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("model", provider=provider)
    found = Agent(model, output_type=Event).run_sync("When do we meet?", model_settings={"max_tokens": 150})
    assert isinstance(found.output, Event)
    said = Agent(model).run_sync("Hello", model_settings={"max_tokens": 8})
    assert said.output and said.usage.output_tokens == 8
