"""Transport of messages between processes: encrypted ZeroMQ sockets, and certificates of TLS connections."""
