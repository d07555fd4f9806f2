"""Several routers, each in a process of its own, that the launcher starts and watches."""
