"""The reference set: examples in any format, their tokens in windows, splits by example."""
