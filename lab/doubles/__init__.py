"""Doubles that the tests of the lab use."""
