"""Settings: one model, and how flags, environment and YAML feed it."""
