"""Helpers of the tests: fakes, rigs, models, and processes that tests control."""
