# MariaDB with its own defaults: InnoDB over io_uring, asked by clients that stay connected.
quiet = subprocess.DEVNULL
os.chmod(folder, 0o755)
data, socket = f"{folder}/data", f"{folder}/socket"
whose = ["--user=root"] if os.geteuid() == 0 else []
made = subprocess.run(
    ["mariadb-install-db", "--no-defaults", *whose, f"--datadir={data}", "--auth-root-authentication-method=normal"],
    stdin=quiet, stdout=quiet, stderr=quiet,
)
require(made.returncode == 0, "no database")
command = ["mariadbd", "--no-defaults", *whose, f"--datadir={data}", f"--socket={socket}", "--skip-networking"]
server = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=open(f"{folder}/log", "w"))
client = ["mariadb", "--no-defaults", "-u", "root", f"--socket={socket}"]


def answers():
    require(server.poll() is None, open(f"{folder}/log").read()[-2000:])
    return subprocess.run([*client, "-e", "SELECT 1"], stdout=quiet, stderr=quiet).returncode == 0


wait_for("MariaDB", answers)
# What it does where it may not: it says so, and uses libaio.
uring = any("io_uring" in os.readlink(f"/proc/{server.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{server.pid}/fd"))
require(uring or "io_uring" in open(f"{folder}/log").read(), "MariaDB has no ring, and does not say why")
client += ["--batch", "--unbuffered", "--skip-column-names"]
first = Asked(client)
first.ask("CREATE DATABASE kept")
first.end()
keep_steps(Asked([*client, "kept"]), Asked([*client, "kept"]), Steps())
server.terminate()
os._exit(7 if server.wait() == 0 else 1)
