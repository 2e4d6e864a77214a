"""Hypothesis profiles: few examples by default, more with ``--hypothesis-profile=thorough``."""

from hypothesis import settings

settings.register_profile("quick", max_examples=30)
settings.register_profile("thorough", max_examples=100)
settings.load_profile("quick")
