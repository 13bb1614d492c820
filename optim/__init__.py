"""The algorithms: ordinary torch optimizers that know a Collective, never the network."""
