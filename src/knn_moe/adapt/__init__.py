"""Change a memory after it was built: calibrate, prune, compress, and controls of it."""
