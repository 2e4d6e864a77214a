"""Server ends of the transports: attach socket, calls socket, gRPC and HTTP."""
