"""Benchmarks and fault injection: everything that measures or attacks a daemon from outside."""
