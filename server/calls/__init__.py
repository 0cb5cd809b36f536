"""Tool calls: what may be called, the grammar that demands it, and how it is read back."""
