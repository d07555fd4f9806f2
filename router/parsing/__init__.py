"""Parsers that split an answer's text into reasoning, content and tool calls as it is generated."""
