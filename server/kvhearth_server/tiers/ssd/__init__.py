"""The SSD tier: log-structured segment files, asynchronous direct I/O from and to arena slots."""
