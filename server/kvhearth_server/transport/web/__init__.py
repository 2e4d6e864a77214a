"""HTTP for probes, scrapers and operators; decisions and bytes never come this way."""
