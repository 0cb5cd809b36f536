"""The engine as a process of its own: what is said between it and the HTTP process, and who keeps it running."""
