"""Lessons in how language models are served, each one file that runs."""
