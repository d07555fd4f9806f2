"""The `object_store` transport: blocks as objects in Ray's store, everything else in actor calls."""
