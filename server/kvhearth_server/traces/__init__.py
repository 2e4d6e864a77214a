"""Traces of lookups and stores: the file, its simulation. Keys in it are salted hashes."""
