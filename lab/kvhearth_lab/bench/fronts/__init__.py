"""Engines' own offloading tiers over KVHearth, and over their own files, in turns."""
