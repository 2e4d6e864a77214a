"""Version of the distribution, and of the protocols that it speaks."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Version of the attach handshake and of ``kvhearth.proto.v1``; both sides must agree."""
