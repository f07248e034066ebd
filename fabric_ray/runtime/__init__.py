"""Engines inside Ray: one per process, found by name, joined by the cluster's token."""

from fabric_ray.runtime.directory import Directory, Entry, directory
from fabric_ray.runtime.process import engine, shutdown

__all__ = ["Directory", "Entry", "directory", "engine", "shutdown"]
