"""The code that all worker roles share: setup, connections to routers, heartbeat, engine loop."""
