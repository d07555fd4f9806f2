"""Where a request's drafts are made: `interface`, `rates`, and `decide` above them. Pure functions."""
