# What the programs here have in common: the nonce, the sum and the value that follow from it, and a line for each step.
import os, struct, sys, tempfile, time

folder = tempfile.mkdtemp(dir=sys.argv[1])

class Steps:
    def __init__(self):
        self.count = int(sys.argv[-1])
        self.nonce = struct.unpack("<Q", os.urandom(8))[0]
        self.total, self.value = 0.0, self.nonce

    # Each step with its value, which what is tested must bring back before the line is said.
    def __iter__(self):
        for step in range(1, self.count + 1):
            self.total += 1.0 / step
            self.value = (self.value * 6364136223846793005 + 1) % 2**64
            yield step, self.value
            os.write(1, f"{self.nonce:016x} {step} {self.total!r} {self.value:016x}\n".encode())
            time.sleep(0.002)


def require(good, what):
    if not good:
        os.write(1, f"wrong: {what}\n".encode())
        os._exit(1)


# Until it holds, or something is wrong.
def wait_for(what, condition):
    begin = time.monotonic()
    while not condition():
        require(time.monotonic() - begin < 30, f"{what} does not come")
        time.sleep(0.001)
