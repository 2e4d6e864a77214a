"""The gateway: a process that serves engines on other hosts, as one more local client."""
