"""Lossless delta pushes: a trainer sends the elements that changed since the version before."""

from fabric_ray.weights.delta.choice import DeltaChoice
from fabric_ray.weights.delta.inbox import DeltaInbox
from fabric_ray.weights.delta.sender import DeltaSender

__all__ = ["DeltaChoice", "DeltaInbox", "DeltaSender"]
