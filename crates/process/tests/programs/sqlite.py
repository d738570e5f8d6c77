# Transactions of some steps each: one database with a rollback journal, whose cache is too small for a transaction, and
# one with a write-ahead log, whose index is mapped.
import sqlite3


def database(name, mode):
    made = sqlite3.connect(f"{folder}/{name}", isolation_level=None)
    made.execute(f"PRAGMA journal_mode={mode}")
    made.execute("PRAGMA cache_size=2")
    made.execute("CREATE TABLE steps (step INTEGER PRIMARY KEY, value TEXT, rest BLOB)")
    return made


steps = Steps()
both = [database("journal", "DELETE"), database("wal", "WAL")]
values = []
for step, value in steps:
    values.append(f"{value:016x}")
    for one in both:
        if step % 7 == 1:
            one.execute("BEGIN")
        one.execute("INSERT INTO steps VALUES (?, ?, randomblob(3000))", (step, values[-1]))
        if step % 7 == 3:
            one.execute("UPDATE steps SET rest = randomblob(2000) WHERE step % 3 = 0")
        if step % 7 == 0:
            one.execute("COMMIT")
        count = one.execute("SELECT count(*) FROM steps").fetchone()
        require(count == (step,), f"{count} rows at step {step}")
for one in both:
    if one.in_transaction:
        one.execute("COMMIT")
    require(one.execute("PRAGMA integrity_check").fetchall() == [("ok",)], "a damaged database")
    found = [value for value, in one.execute("SELECT value FROM steps ORDER BY step")]
    require(found == values, "other rows")
    one.close()
os._exit(7)
