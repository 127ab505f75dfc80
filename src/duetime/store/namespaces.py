"""Reading and writing namespaces."""

from __future__ import annotations

from typing import Protocol

from duetime.model import Namespace


class Namespaces(Protocol):
    async def namespaces(self) -> list[Namespace]:
        """Return every readable namespace; ``default`` is one of them unless its row is damaged. From this call on, the
        timers of unreadable namespaces are neither begun nor listed as due. Cheap as long as no namespace changes."""

    async def namespace(self, name: str) -> Namespace | None:
        """Return the namespace with this name; raise ``Quarantined`` if it can't be read."""

    async def put_namespace(self, namespace: Namespace, most: int | None = None) -> Namespace | None:
        """Insert a new namespace. If one with this name exists, leave it unchanged and return it; raise ``Quarantined``
        if it can't be read. Raise ``TooManyNamespaces`` if ``most`` namespaces exist already."""

    async def swap_namespace(self, before: Namespace, after: Namespace) -> bool:
        """Replace ``before`` by ``after``, which has the next revision, if the stored namespace still has the revision
        of ``before``. Return whether it had."""
