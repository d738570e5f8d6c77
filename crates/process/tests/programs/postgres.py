# PostgreSQL with its own defaults: a process for each client and some of its own, which share memory.
import glob

quiet = subprocess.DEVNULL
bin = sorted(glob.glob("/usr/lib/postgresql/*/bin"))[-1]
data, somebody = f"{folder}/data", somebody()
os.chmod(folder, 0o777)
made = subprocess.run(
    [f"{bin}/initdb", "-D", data, "-U", "tester", "-A", "trust", "--locale=C"],
    stdin=quiet, stdout=quiet, stderr=quiet, cwd=folder, **somebody,
)
require(made.returncode == 0, "no database")
command = [f"{bin}/postgres", "-D", data, "-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}"]
log = open(f"{folder}/log", "w")
server = subprocess.Popen(command, stdin=quiet, stdout=log, stderr=log, cwd=folder, **somebody)
client = [f"{bin}/psql", "-X", "-h", folder, "-U", "tester", "-q", "-A", "-t", "-F", "\t", "template1"]


def answers():
    require(server.poll() is None, open(f"{folder}/log").read()[-2000:])
    return subprocess.run([*client, "-c", "SELECT 1"], stdout=quiet, stderr=quiet).returncode == 0


wait_for("PostgreSQL", answers)
keep_steps(Asked(client), Asked(client), Steps())
server.terminate()
os._exit(7 if server.wait() == 0 else 1)
