"""Storage tiers for KV blocks that memory has no room for: one protocol, several tiers."""
