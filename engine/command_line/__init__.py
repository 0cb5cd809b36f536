"""What the command lines of all rooms share: the parser, what --speculative-config says, files that are written."""
