"""KV blocks as bytes: their layout, their indices on the wire, copies and conversions."""
