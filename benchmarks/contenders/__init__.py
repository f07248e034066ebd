"""One file per contender: the floors, the peers and ourselves."""
