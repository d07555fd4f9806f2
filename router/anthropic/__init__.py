"""`/v1/messages`: a chat in Anthropic's format."""
