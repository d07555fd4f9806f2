"""The prefill loop: computes prompts in chunks and hands their blocks over to decode workers."""
