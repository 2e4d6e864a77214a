"""Asynchronous disk queues over the kernel's own interfaces."""
