"""Reads request bodies into prepared requests and generations."""
