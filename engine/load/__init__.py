"""Loads a checkpoint, probes it, packs its weights and chooses the forward that runs it."""
