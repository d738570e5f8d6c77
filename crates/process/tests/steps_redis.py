# As step.c, but all that changes from step to step lives in a redis-server, asked through one
# connection that stays open.
import os, socket, struct, subprocess, sys, time

steps = int(sys.argv[1])
nonce = struct.unpack("<Q", os.urandom(8))[0]
probe = socket.socket()
probe.bind(("127.0.0.1", 0))
port = probe.getsockname()[1]
probe.close()
options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp"]
quiet = subprocess.DEVNULL
server = subprocess.Popen(["redis-server", *options], stdin=quiet, stdout=quiet, stderr=quiet)
while True:
    try:
        connection = socket.create_connection(("127.0.0.1", port))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
stream = connection.makefile("rwb")


def ask(*words):
    stream.write(b"*%d\r\n" % len(words))
    for word in map(lambda word: str(word).encode(), words):
        stream.write(b"$%d\r\n%s\r\n" % (len(word), word))
    stream.flush()
    answer = stream.readline().strip()
    if answer.startswith(b"$"):
        return stream.read(int(answer[1:]) + 2)[:-2].decode()
    return answer[1:].decode()


ask("SET", "value", nonce)
ask("SET", "sum", "0.0")
for step in range(1, steps + 1):
    value = (int(ask("GET", "value")) * 6364136223846793005 + 1) % 2**64
    total = float(ask("GET", "sum")) + 1.0 / step
    ask("SET", "value", value)
    ask("SET", "sum", repr(total))
    assert int(ask("INCR", "steps")) == step
    os.write(1, f"{nonce:016x} {step} {total!r} {value:016x}\n".encode())
    time.sleep(0.002)
server.terminate()
os._exit(7 if server.wait() == 0 else 1)
