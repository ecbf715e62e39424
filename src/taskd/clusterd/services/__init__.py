"""The gRPC services of clusterd."""
