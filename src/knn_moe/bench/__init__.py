"""Benchmarks: each prints ratios against a named baseline measured in the same run."""
