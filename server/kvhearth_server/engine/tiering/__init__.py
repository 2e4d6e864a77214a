"""Moves blocks between memory and the SSD tier: write-back, promotion, naming."""
