"""What the machine offers: doctor, CRIU, btrfs, cgroups, mounts, processes. Knows nothing of sandboxes."""
