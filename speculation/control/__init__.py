"""Decides for how many tokens each request speculates in the coming step."""
