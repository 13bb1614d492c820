"""The network: discovery, rounds and state transfer on top of hivemind."""
