"""Drivers: one for each client library, imported only by the helper process of such a remote."""
