"""``kvhearth bench gpu``: bandwidth of copies and time to the first token on a GPU.

``lab/gpu/run.py`` uses the same parts, and more of its own.
"""
