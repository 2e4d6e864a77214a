"""How decisions travel: one protocol, one module a way."""
