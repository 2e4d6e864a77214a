"""The doors: attach socket and gRPC."""
