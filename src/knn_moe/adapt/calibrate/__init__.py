"""Calibration: choose how a memory is used by parts of its own reference set."""
