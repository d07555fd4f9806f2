"""The workers that this router knows, their load and their caches."""
