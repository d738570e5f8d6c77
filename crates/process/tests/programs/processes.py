# Python's own ways to share work: a pool, queues, locks, shared memory, a manager's server, a pipeline of other programs.
import multiprocessing, subprocess
from multiprocessing import shared_memory


def add(value):
    return (value + 1) % 2**64


def work(lock, inbox, outbox, counter, name):
    memory = shared_memory.SharedMemory(name)
    for value in iter(inbox.get, None):
        with lock:
            counter.value += 1
            memory.buf[:8] = value.to_bytes(8, "little")
        outbox.put(value ^ 1)


def main():
    steps = Steps()
    memory = shared_memory.SharedMemory(create=True, size=10000)
    lock, counter = multiprocessing.Lock(), multiprocessing.Value("q", 0)
    inbox, outbox = multiprocessing.Queue(), multiprocessing.SimpleQueue()
    worker = multiprocessing.Process(target=work, args=(lock, inbox, outbox, counter, memory.name))
    worker.start()
    pool = multiprocessing.Pool(2)
    manager = multiprocessing.Manager()
    kept = manager.dict()
    pipeline = subprocess.Popen(
        "stdbuf -oL tr a-f A-F | stdbuf -oL sed 's/^/x/'", shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    for step, value in steps:
        inbox.put(value)
        require(outbox.get() == value ^ 1, "another answer")
        with lock:
            require(counter.value == step, "another count")
            require(bytes(memory.buf[:8]) == value.to_bytes(8, "little"), "other shared memory")
        require(pool.map(add, [value, step]) == [add(value), step + 1], "another sum")
        kept[step] = value
        require(kept.get(step // 2 + 1) is not None and len(kept) == step, "other keys")
        pipeline.stdin.write(f"{value:016x}\n".encode())
        pipeline.stdin.flush()
        require(pipeline.stdout.readline() == f"x{value:016X}\n".encode(), "another line")
    inbox.put(None)
    worker.join()
    pool.close()
    pool.join()
    manager.shutdown()
    memory.close()
    memory.unlink()
    pipeline.stdin.close()
    sys.exit(7 if worker.exitcode == 0 and pipeline.wait() == 0 else 1)


main()
