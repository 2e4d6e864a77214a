"""The engine loop: owns the core, applies its actions, and runs the work beside it."""
