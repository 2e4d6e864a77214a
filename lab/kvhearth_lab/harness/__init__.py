"""Daemons, clients and drives that benchmarks and torture start and control."""
