"""Splits an answer's text, as it comes, into reasoning, content and tool calls."""
