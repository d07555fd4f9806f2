"""Where KV blocks go when the device pool has no room for them: host memory, and below it the disk."""
