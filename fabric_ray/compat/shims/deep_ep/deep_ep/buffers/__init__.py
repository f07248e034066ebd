"""``deep_ep.buffers``."""
