"""How many workers of each role there are: by hand, and by themselves."""
