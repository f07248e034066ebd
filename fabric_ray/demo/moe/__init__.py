"""Expert parallelism on Ray: compared bit by bit, killed, masked, and made whole again."""
