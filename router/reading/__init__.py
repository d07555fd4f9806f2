"""The reading of request bodies into prepared requests and generations."""
