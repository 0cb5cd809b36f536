"""`pilotfish bench`: speed of a model's rounds on a device, with real or random weights."""
