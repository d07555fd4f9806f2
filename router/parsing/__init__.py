"""From an answer's text to its reasoning, its content and its tool calls, while it comes."""
