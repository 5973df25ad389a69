"""A demo's result as one self-contained web page: numbers said in words, charts, passages."""
