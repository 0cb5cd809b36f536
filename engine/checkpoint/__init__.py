"""Checkpoints: recognised from metadata, checked in full, then loaded.

recognise.open_checkpoint(folder) -> Checkpoint, from config.json and headers alone; imports no torch.
load.load_weights(checkpoint, device) -> weights by normalised name, a tensor or a packed NvFp4Weight each.

headers.py reads safetensors headers and trusts none; names.py knows the nestings; layouts.py tells how one module
is stored; inventory.py lists what a config implies; quantization.py holds config and headers against each other;
nvfp4.py is the packed format in plain torch.
"""
