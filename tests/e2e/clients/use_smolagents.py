"""`smolagents`: a model that must use a tool, and one that answers in text."""

import json

from answers import Weather
from common import API
from smolagents import OpenAIModel, Tool


class WeatherTool(Tool):
    """Tells the weather."""

    name = "weather"
    description = "Tells the weather."
    inputs = {"city": {"type": "string", "description": "The city.", "enum": ["Paris", "Rome"]}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        return city


model = OpenAIModel(model_id="model", api_base=API, api_key="none", seed=1)
ask = [{"role": "user", "content": [{"type": "text", "text": "Is it raining?"}]}]
assert model.generate(ask, max_tokens=8).content
assert "".join(delta.content or "" for delta in model.generate_stream(ask, max_tokens=8))
(call,) = model.generate(ask, tools_to_call_from=[WeatherTool()], max_tokens=150).tool_calls
arguments = call.function.arguments
assert Weather.model_validate(json.loads(arguments) if isinstance(arguments, str) else arguments)
