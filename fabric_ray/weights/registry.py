"""The sources and targets of this process, by name: how a controller finds them in an actor."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from fabric_ray.errors import InvalidArgument

T = TypeVar("T")


class Registry(Generic[T]):
    """Living objects of one kind. Holds them weakly: they belong to the actor."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._items: WeakValueDictionary[str, T] = WeakValueDictionary()
        # Whoever collects garbage under it may come back to close another one.
        self._lock = threading.RLock()

    def add(self, name: str, item: T) -> None:
        with self._lock:
            if name in self._items:
                raise InvalidArgument(
                    f"this process has a {self._kind} called {name!r} already; give this one "
                    "another name"
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

    def remove(self, name: str, item: T) -> None:
        """Forgets it, unless the name is another's by now."""
        with self._lock:
            if self._items.get(name) is item:
                del self._items[name]
