"""Live requests and what one of them carries."""
