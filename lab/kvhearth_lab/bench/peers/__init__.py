"""``kvhearth bench peers``: other caches at the same sizes, in turns with KVHearth, in one run.

Each peer runs in its own interpreter behind one adapter process (``adapters/``), which is driven by
lines of JSON. Nothing of a peer is imported here.
"""
