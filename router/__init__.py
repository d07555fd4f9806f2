"""The router: HTTP API, tokenizing, journal and placement. It never imports torch."""
