"""Chat templates: what they can show, and how messages are rendered."""
