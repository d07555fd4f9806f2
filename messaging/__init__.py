"""What messages travel over: encrypted sockets, and the certificates of TLS connections."""
