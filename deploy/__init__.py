"""Ray actors and their supervision, the launcher and the command line."""
