"""Remote tier: blocks on an engine that several daemons share."""
