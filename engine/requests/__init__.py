"""Requests inside the engine: what they may ask for, what each holds, whose turn it is, when its text is a loop."""
