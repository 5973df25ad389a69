"""Build a memory (§4.1): optimise the routing of every reference token and stream it to disk."""
