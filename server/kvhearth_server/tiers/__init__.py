"""Where KV goes when memory is too small: one protocol, several tiers behind it."""
