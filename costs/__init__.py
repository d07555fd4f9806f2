"""Predictions of the time of steps, of drafts and of trials of either, learned from steps that ran."""
