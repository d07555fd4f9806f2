"""One model on one device: loading, paged KV, scheduling, batched forwards, sampling."""

from engine.light_imports import install

install()
