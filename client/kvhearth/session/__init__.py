"""One attached client: handshake, mapped arena, heartbeats, queued releases."""
