"""`instructor`: a typed answer by a tool and by a schema."""

import instructor
import openai
from answers import Event
from common import API, ASK

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=API, api_key="none"), mode=mode)
    event = client.chat.completions.create(model="model", messages=ASK, response_model=Event, max_retries=0)
    assert isinstance(event, Event)
