"""A conversation with a model and its memories. Knows nothing of terminals."""
