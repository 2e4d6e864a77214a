"""Adapters between an engine's own interface and ``KVClient`` with its copiers."""
