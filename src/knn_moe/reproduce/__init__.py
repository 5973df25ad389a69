"""Reproduce every table of the paper on models and data that are at hand."""
