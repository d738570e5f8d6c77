# As step.c, in Python: the steps are done by threads and by coroutines, by turns.
import asyncio, os, struct, sys, threading, time

steps = int(sys.argv[1])
nonce = struct.unpack("<Q", os.urandom(8))[0]
state = {"value": nonce, "sum": 0.0, "turn": 1}
changed = threading.Condition()


def step(number):
    state["sum"] += 1.0 / number
    state["value"] = (state["value"] * 6364136223846793005 + 1) % 2**64
    line = f"{nonce:016x} {number} {state['sum']!r} {state['value']:016x}\n"
    os.write(1, line.encode())
    time.sleep(0.002)


def by_thread(which):
    for number in range(1 + which, steps + 1, 4):
        with changed:
            changed.wait_for(lambda: state["turn"] >= number)
            step(number)
            state["turn"] = number + 1
            changed.notify_all()


async def by_coroutine(which):
    for number in range(1 + which, steps + 1, 4):
        while state["turn"] < number:
            await asyncio.sleep(0.001)
        with changed:
            step(number)
            state["turn"] = number + 1
            changed.notify_all()


async def coroutines():
    await asyncio.gather(by_coroutine(2), by_coroutine(3))


threads = [threading.Thread(target=by_thread, args=(which,)) for which in range(2)]
[thread.start() for thread in threads]
asyncio.run(coroutines())
[thread.join() for thread in threads]
os._exit(7)
