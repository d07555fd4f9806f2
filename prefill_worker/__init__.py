"""The prefill loop: compute prompts in chunks and hand their blocks to decode workers."""
