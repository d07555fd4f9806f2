"""The router: HTTP API, tokenizing, journal, placement. It never imports torch."""
