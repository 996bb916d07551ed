"""Where checkpoints lie. Knows folders, sizes and digests; not what a process image or a sandbox is."""
