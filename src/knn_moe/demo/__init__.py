"""Show the method from end to end on an embedded model: build, evaluate, explain."""
