"""What the HTTP API costs, with workers whose steps take a set time."""
