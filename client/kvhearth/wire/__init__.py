"""Encoding of the traffic between client and daemon: frames, handshake, messages, statuses."""
