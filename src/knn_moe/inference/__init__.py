"""Put memories on a running model and take them off again."""
