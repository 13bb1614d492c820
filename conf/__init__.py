"""The Hydra tree: one folder per group, one file per choice, holding only what differs from the dataclasses."""
