"""Encoding of what travels between client and daemon: frames, handshake, messages, statuses."""
