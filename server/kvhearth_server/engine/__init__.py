"""The engine loop: owns the core, applies its actions, runs what works beside it."""
