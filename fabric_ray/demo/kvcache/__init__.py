"""Disaggregated inference on Ray Serve: streamed, scaled, killed, and compared token for token."""
