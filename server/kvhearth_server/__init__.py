"""The KVHearth daemon."""
