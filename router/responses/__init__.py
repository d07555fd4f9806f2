"""`/v1/responses`: a chat in OpenAI's newer format, with stored responses to continue."""
