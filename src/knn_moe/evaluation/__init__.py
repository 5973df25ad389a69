"""Evaluate methods on tasks: run them, store the samples, compare the results."""
