"""A chat in the terminal, with a server that runs or one that is started."""
