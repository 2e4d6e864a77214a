"""``kvhearth bench peers``: the same sizes on other caches, in turns with ours, in one run.

Each peer runs in its own interpreter behind one adapter process (``adapters/``), which is driven
by lines of JSON. Nothing of a peer is imported here.
"""
