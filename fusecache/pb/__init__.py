"""Generated protocol modules (proto/generate.py). Not edited, only imported by layers that speak gRPC."""
