"""The round: one body over a table of operators, captured in graphs or launched as it is."""
