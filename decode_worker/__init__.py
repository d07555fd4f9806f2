"""The decode loop: take prompts over from prefill workers and generate."""
