"""Connectors: an engine's own interface on one side, ``KVClient`` and copiers on the other."""
