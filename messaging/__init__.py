"""Transport of messages between processes: encrypted ZeroMQ sockets, and certificates for TLS connections."""
