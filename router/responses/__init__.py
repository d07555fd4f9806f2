"""`/v1/responses`: a chat in OpenAI's newer format, with the earlier answers stored."""
