"""A mover's helper process, the only one that loads a remote's client library."""
