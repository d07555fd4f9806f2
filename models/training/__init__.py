"""Trains the bundled pair on CPython's standard library: see models/README.md for the commands."""
