"""The audit class of each database server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tests.contract.mysql_audit import MysqlAudit
from tests.contract.postgres_audit import PostgresAudit
from tests.contract.races import Audit

AUDITS: dict[str | None, Callable[[str], Coroutine[Any, Any, Audit]]] = {
    "postgres15": PostgresAudit.of,
    "postgres18": PostgresAudit.of,
    "mariadb": MysqlAudit.of,
    "mysql9": MysqlAudit.of,
}
