"""Benchmarks and fault injection that measure or attack a daemon from outside."""
