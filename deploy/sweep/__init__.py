"""`pilotfish sweep`: every k with every number of sequences, each on a fresh server, measured as a client sees it."""
