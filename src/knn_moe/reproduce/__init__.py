"""Every table of the paper, run again on models and data that are at hand."""
