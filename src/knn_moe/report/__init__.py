"""The page of evaluated runs: tables, charts and passages."""
