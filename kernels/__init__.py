"""Operators: one a file, each with its plain torch reference."""
