"""KV blocks as bytes: their layout, how pieces name them, copying and converting them."""
