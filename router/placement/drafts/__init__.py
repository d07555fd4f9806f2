"""Decisions where a request's drafts are made: `prospects` by pure functions, `kinds` by observation."""
