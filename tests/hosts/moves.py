# As moves.c, by the Python module; and the events of each move that came to its end.
import ctypes
import os
import sys

import kedge

address = ctypes.c_uint64(0)
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    cuda = None
if cuda is not None and cuda.cuInit(0) == 0:
    context = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4)) == 0
for turn, to in enumerate(sys.argv[1:], 1):
    number, found = ctypes.c_int(turn * 1000 + os.getpid()), ctypes.c_int()
    if address.value:
        assert cuda.cuMemcpyHtoD_v2(address, ctypes.byref(number), ctypes.c_size_t(4)) == 0
    heard, own = [], ValueError("mine")
    try:
        events = kedge.migrate(to, tell=heard.append)
        assert events == heard and [e["event"] for e in events][-2:] == ["pause", "done"], events
        outcome, why = 0, ""
    except kedge.Error as error:
        outcome, why = -1, str(error)
    if turn == 2 and outcome == 0:
        def fail(event):
            raise own
        try:
            kedge.migrate(to, tell=fail)
            outcome, why = -1, "its own error is lost"
        except ValueError as error:
            assert error is own
        # That move goes on without anybody who listens.
        while True:
            try:
                kedge.migrate(to, check=True)
                break
            except kedge.Error as error:
                assert "under way" in str(error), error
    if address.value:
        assert cuda.cuMemcpyDtoH_v2(ctypes.byref(found), address, ctypes.c_size_t(4)) == 0
    print(outcome, "same" if found.value == number.value else "none", why, flush=True)
sys.exit(6)
