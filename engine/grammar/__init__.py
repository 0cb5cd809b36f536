"""Grammars in a box: bounded by size, tried in a process that can be lost, compiled on a thread of their own."""
