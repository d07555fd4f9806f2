"""What prefill and decode workers share: set-up, the router's line, the heartbeat and the engine loop."""
