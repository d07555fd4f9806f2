"""`/v1/responses`: a chat in OpenAI's newer shapes, with the earlier answers kept."""
