"""From corpora to batches: sources, splits between peers, reproducible streams."""
