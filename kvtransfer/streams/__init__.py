"""Data connections: the handshake, the queue of pieces, and the threads of both sides."""
