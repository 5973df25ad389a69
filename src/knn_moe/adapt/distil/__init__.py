"""Distil a memory: a few prototypes a layer, learned through the frozen model."""
