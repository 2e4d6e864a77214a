"""Settings: one model, filled from flags, environment and YAML."""
