"""Boot gates: what a server really does is looked at before it gets traffic."""
