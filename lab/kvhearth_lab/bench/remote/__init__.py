"""``kvhearth bench remote``: blocks through a gateway, beside bare sockets and other caches."""
