"""The transports: a file or folder each. `transport` says what one implements, `registry` opens them."""
