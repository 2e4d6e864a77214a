"""HTTP for probes, scrapers and operators; it never carries engines' calls or blocks' bytes."""
