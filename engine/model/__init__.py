"""Describes models: families, a checkpoint's text half, its fingerprint."""
