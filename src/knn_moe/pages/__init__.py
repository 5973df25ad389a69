"""Web pages: their templates, styles and scripts, filled into one file that needs no network."""
