"""Checkpoints: capture, restore, verify, compare, archive. Turns a running sandbox into a manifest and back."""
