"""The message bus over gRPC: server and client side of each node, links, admission, TLS."""
