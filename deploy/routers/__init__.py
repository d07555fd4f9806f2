"""Several routers, each in its own process, which the launcher starts and watches."""
