"""Structured outputs by the schemas of JSON-Schema-Test-Suite: `python -m bench.schemas`."""
