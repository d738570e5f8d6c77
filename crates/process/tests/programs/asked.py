# A program that is asked line by line, and answers each question with lines of which the last is known.
import pwd, subprocess


class Asked:
    def __init__(self, command, **options):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, **options)

    # Its answer to statements, a list of words for each row.
    def ask(self, statements):
        self.process.stdin.write(f"{statements}; SELECT 'over';\n".encode())
        self.process.stdin.flush()
        rows = []
        while (line := self.process.stdout.readline().decode()) != "over\n":
            require(line != "", f"no answer to {statements}")
            rows.append(line.rstrip("\n").split("\t"))
        return rows

    def end(self):
        self.process.stdin.close()
        require(self.process.wait() == 0, "a client failed")


# What a server runs as that refuses root, or drops its rights.
def somebody():
    return {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}


# Transactions of some steps each, by a client that stays connected; another one reads what is committed.
def keep_steps(writer, reader, steps):
    writer.ask("CREATE TABLE steps (step INT PRIMARY KEY, value CHAR(16), rest VARCHAR(3000))")
    values = []
    for step, value in steps:
        values.append(f"{value:016x}")
        if step % 7 == 1:
            writer.ask("BEGIN")
        writer.ask(f"INSERT INTO steps VALUES ({step}, '{values[-1]}', repeat('r', 3000))")
        if step % 7 == 0:
            writer.ask("COMMIT")
        count = writer.ask("SELECT count(*) FROM steps")
        require(count == [[str(step)]], f"{count} rows at step {step}")
        count = reader.ask("SELECT count(*) FROM steps")
        require(count == [[str(step - step % 7)]], f"{count} rows are committed at step {step}")
    writer.ask("COMMIT")
    found = reader.ask("SELECT value FROM steps ORDER BY step")
    require(found == [[value] for value in values], "other rows")
    writer.end()
    reader.end()
