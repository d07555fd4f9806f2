"""Sends requests to workers, places them again, and moves them off workers that leave."""
