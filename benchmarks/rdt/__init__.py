"""Tensors by object reference between two Ray actors, by transport."""
