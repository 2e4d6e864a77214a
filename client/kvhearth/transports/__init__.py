"""Transports for decisions: one protocol, one module per transport."""
