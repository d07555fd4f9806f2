"""The code that all roles of workers share: set-up, the connections to routers, the heartbeat and the engine
loop.
"""
