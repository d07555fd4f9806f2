"""The code that all roles of workers share: set-up, connections to routers, heartbeat, engine loop."""
