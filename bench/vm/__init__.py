"""The inspector's programs on other kernels: `boot.sh` starts one, `trial` runs in it."""
