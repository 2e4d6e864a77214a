"""Code that runs in a peer's interpreter; ``harness`` is started there and loads one peer's
file.
"""
