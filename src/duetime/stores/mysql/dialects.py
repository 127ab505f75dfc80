"""Differences between the servers that the MySQL store supports: MySQL, MariaDB and TiDB."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct
from msgspec.structs import replace


class Dialect(Struct, frozen=True):
    select_into: str
    """The template of ``select_into_variable``."""
    share: str
    """The lock of a fence, which blocks claims."""
    skip: str
    """The lock of a second claim, which omits the shards that another transaction keeps locked, if the server can."""
    now: str
    """The store's clock in milliseconds."""
    read_only: str
    """The variable that is true if the server rejects writes."""
    limited_select: str
    """The template of ``limited``."""
    durable: tuple[tuple[str, str], ...] = ()
    """Settings, each with the expression that is true if it makes the server flush a commit to disk before it
    acknowledges it."""
    session: tuple[str, ...] = ()
    """Statements for a new connection, besides those for every server."""
    reads_begin: tuple[str, ...] = ()
    reads_end: tuple[str, ...] = ()
    """Statements before and after plain reads."""

    def limited(self, statement: str, seconds_max: float) -> str:
        """Give a SELECT a time limit on the server. A limit of the session would be wrong: on MariaDB it would also
        apply to a commit, which may wait for a replica, and on MySQL to the wait for a named lock."""
        verb, _, rest = statement.partition(" ")
        if verb != "SELECT":
            return statement
        return self.limited_select.format(rest=rest, seconds=seconds_max, ms=round(seconds_max * 1000))

    def select_into_variable(
        self, variable: str, what: str, rows: str, *, lock: str = "", check: str = "", when: str = ""
    ) -> str:
        """Set a session variable to ``what``, selected from ``rows`` (the SQL from FROM on), and lock the rows until
        the commit. ``what`` must not be NULL. ``check`` is appended to it; ``when`` is a further condition."""
        return self.select_into.format(
            variable=variable,
            what=what,
            rows=rows,
            lock=lock or "FOR UPDATE",
            check=check,
            when=when and f"{when} AND ",
        )


MYSQL = Dialect(
    select_into="SET @{variable} = {when}(SELECT {what} {rows} {lock}){check}",
    share="LOCK IN SHARE MODE",
    skip="FOR UPDATE SKIP LOCKED",
    now="CAST(FLOOR(UNIX_TIMESTAMP(NOW(3)) * 1000) AS SIGNED)",
    read_only="@@global.read_only",
    limited_select="SELECT /*+ MAX_EXECUTION_TIME({ms}) */ {rest}",
    durable=(
        ("innodb_flush_log_at_trx_commit", "@@global.innodb_flush_log_at_trx_commit IN (1, 3)"),
        # After a crash, the server rolls back the transactions that its binary log lacks, although InnoDB has them.
        ("sync_binlog", "@@global.log_bin = 0 OR @@global.sync_binlog = 1"),
    ),
)

MARIADB = replace(MYSQL, limited_select="SET STATEMENT max_statement_time = {seconds:.3f} FOR SELECT {rest}")

TIDB = Dialect(
    # In SET, a locking read that had to wait for a change of its rows fails with a write conflict. SELECT reads the
    # rows again, but it does not assign NULL.
    select_into="SELECT @{variable} := ({when}{what}{check}) {rows} {lock}",
    share="FOR UPDATE",  # LOCK IN SHARE MODE is rejected or has no effect
    skip="FOR UPDATE",
    # The timestamp of the transaction comes from PD, the only clock that all servers of a cluster share. Outside a
    # transaction there is none; then this is NULL, and every comparison with it is false.
    now="NULLIF(CAST(CAST(@@tidb_current_ts AS UNSIGNED) >> 18 AS SIGNED), 0)",
    read_only="@@global.tidb_super_read_only",
    limited_select=MYSQL.limited_select,
    # ``durable`` is empty: Raft acknowledges only what a majority has written.
    session=("SET SESSION tidb_txn_mode = 'pessimistic'",),  # optimistic transactions take no locks before the commit
    reads_begin=("START TRANSACTION",),
    reads_end=("COMMIT",),
)

DETECT = "SHOW VARIABLES WHERE variable_name IN ('tidb_txn_mode', 'max_statement_time')"
"""Returns the variables that only TiDB or only MariaDB has. VERSION() is no help: on TiDB it is a setting, which may
name a MySQL version."""


def dialect_of(variables: Collection[str]) -> Dialect:
    if "tidb_txn_mode" in variables:
        return TIDB
    return MARIADB if "max_statement_time" in variables else MYSQL
