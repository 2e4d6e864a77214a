"""Moves blocks between memory and the tiers: write-back, promotion, naming."""
