"""Live requests, and the data of one request."""
