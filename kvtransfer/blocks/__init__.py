"""KV blocks as bytes: their layout, their names within pieces, copies and conversions."""
