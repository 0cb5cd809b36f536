"""Checkpoints: recognised from metadata, checked in full, then loaded.

recognise.open_checkpoint(folder) -> Checkpoint, from config.json and headers alone; imports no torch.
load.load_weights(checkpoint, device) -> weights by normalised name, a tensor or a PackedWeight each.

headers.py reads safetensors headers and trusts none; names.py knows the nestings; layouts.py tells how one module
is stored; inventory.py lists what a config implies; quantization.py reads what each writer's config declares, rules.py
holds that against the headers; nvfp4.py and fp8.py are the packed formats in plain torch. quantize.py makes a packed
checkpoint from a plain one, as recipe.py decides, through write.py; fidelity.py compares the two on a text.
"""
