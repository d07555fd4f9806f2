"""The decode loop: takes prompts over from prefill workers and generates tokens."""
