"""The model drafts for itself: with some of its layers, or with all of them rounded."""
