"""Registries of the sources and targets in a process, by name."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from fabric_ray.errors import InvalidArgument

T = TypeVar("T")


class Registry(Generic[T]):
    """Weak references to objects of one kind, which the actor owns."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._items: WeakValueDictionary[str, T] = WeakValueDictionary()
        # Reentrant: garbage collection under the lock may close another object.
        self._lock = threading.RLock()

    def add(self, name: str, item: T) -> None:
        with self._lock:
            if name in self._items:
                raise InvalidArgument(
                    f"this process has a {self._kind} called {name!r} already; choose another name"
                )
            self._items[name] = item

    def get(self, name: str) -> T:
        with self._lock:
            item = self._items.get(name)
            known = sorted(self._items)
        if item is None:
            raise InvalidArgument(
                f"this process has no {self._kind} called {name!r} (it has "
                f"{', '.join(known) or 'none'}); make one in the actor and keep it"
            )
        return item

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._items

    def remove(self, name: str, item: T) -> None:
        """Removes an object, unless the name now belongs to another."""
        with self._lock:
            if self._items.get(name) is item:
                del self._items[name]
