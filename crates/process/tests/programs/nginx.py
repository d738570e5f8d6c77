# A web server with two workers, asked through connections that stay open; one of them is in the middle of a request at
# every moment.
import socket, subprocess

probe = socket.socket()
probe.bind(("127.0.0.1", 0))
port = probe.getsockname()[1]
probe.close()
os.chmod(folder, 0o755)
os.makedirs(f"{folder}/html")
with open(f"{folder}/html/large", "wb") as large:
    large.write(bytes(range(256)) * 4000)
temporary = "".join(
    f"{kind}_temp_path {folder}/{kind};" for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
)
with open(f"{folder}/nginx.conf", "w") as conf:
    conf.write(
        f"daemon off; worker_processes 2; pid {folder}/pid; error_log {folder}/error.log;"
        f"events {{}} http {{ access_log {folder}/access.log; keepalive_requests 100000; {temporary}"
        f"server {{ listen 127.0.0.1:{port}; listen unix:{folder}/socket; root {folder}/html;"
        f"location /step/ {{ return 200 $request_uri; }} }} }}"
    )
quiet = subprocess.DEVNULL
server = subprocess.Popen(["nginx", "-p", folder, "-c", f"{folder}/nginx.conf"], stdin=quiet, stdout=quiet, stderr=quiet)


def connected(connect):
    while True:
        try:
            return connect()
        except (ConnectionRefusedError, FileNotFoundError):
            require(server.poll() is None, "nginx ended")
            time.sleep(0.01)


def to_unix():
    one = socket.socket(socket.AF_UNIX)
    one.connect(f"{folder}/socket")
    return one


def to_port():
    return socket.create_connection(("127.0.0.1", port))


def ask(stream, path):
    stream.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    stream.flush()


def answer(stream):
    require(stream.readline().startswith(b"HTTP/1.1 200"), "another status")
    length = 0
    while (line := stream.readline().strip()) != b"":
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return stream.read(length)


steps = Steps()
streams = [connected(to_port).makefile("rwb"), connected(to_unix).makefile("rwb")]
# It begins a request that it ends at its end, and another has asked for much and does not read it.
halfway, lazy = connected(to_port).makefile("rwb"), connected(to_port).makefile("rwb")
halfway.write(b"GET /step/half")
halfway.flush()
ask(lazy, "/large")
for step, value in steps:
    fresh = to_port().makefile("rwb")
    for stream in [*streams, fresh]:
        ask(stream, f"/step/{value:016x}")
        require(answer(stream) == f"/step/{value:016x}".encode(), "another answer")
    fresh.close()
halfway.write(b"way HTTP/1.1\r\nHost: x\r\n\r\n")
halfway.flush()
require(answer(halfway) == b"/step/halfway", "another answer to what was begun")
require(answer(lazy) == bytes(range(256)) * 4000, "another file")
server.terminate()
os._exit(7 if server.wait() == 0 else 1)
