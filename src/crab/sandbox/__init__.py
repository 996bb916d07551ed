"""Sandboxes: images, the launch of one, commands in it, files in and out, network. Knows nothing of checkpoints."""
