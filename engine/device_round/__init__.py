"""The round as captured graphs: every operator reads and writes static buffers, and the host reads one round behind."""
