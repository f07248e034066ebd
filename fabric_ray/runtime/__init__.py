"""Engines inside Ray: one per process, found by name, joined by the cluster's token."""

from fabric_ray.runtime.directory import Directory, Entry, directory
from fabric_ray.runtime.process import engine, shutdown
from fabric_ray.runtime.token import cluster_token, ray_token

__all__ = [
    "Directory",
    "Entry",
    "cluster_token",
    "directory",
    "engine",
    "ray_token",
    "shutdown",
]
