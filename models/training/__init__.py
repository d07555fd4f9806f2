"""Trains the bundled pair from scratch on CPython's standard library: see models/README.md for the commands."""
