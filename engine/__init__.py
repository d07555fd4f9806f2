"""One model on one device: loading, paged KV, scheduling, batched forwards, sampling."""
