"""The command line: arguments to configuration to one call. No logic of its own.

One module per command or small group; `main` imports a command when it is called, so that help and version are
fast and import neither grpc nor pyfuse3.
"""
