"""Models that learn from batches: a common interface, one file each."""
