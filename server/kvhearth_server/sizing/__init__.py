"""Calculators: bytes of a model's KV cache, and what a fleet of hosts needs."""
