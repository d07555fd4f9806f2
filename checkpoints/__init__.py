"""Finds what a checkpoint consists of on disk: its configuration, tokenizer and weights' files."""
