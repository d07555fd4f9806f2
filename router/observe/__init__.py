"""Metrics, logs, timings and spans."""
