"""Tensors by object reference between two Ray actors, by transport."""

FABRIC, MAPPED, NIXL, GLOO = "fabric", "fabric mapped", "nixl", "gloo"
NUMPY, STORE = "store numpy", "store torch"
