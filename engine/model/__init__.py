"""Descriptions of models: families, programs, and a checkpoint's text half."""
