"""The pure core: every decision of the daemon, without IO, clock or threads."""
