"""Predicts, and learns from what runs, the time of steps, of drafts and of their trials."""
