"""`fast`: keys of four bits in a coarse partition, searched and mixed by kernels on a GPU."""
