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
    heard = []
    try:
        events = kedge.migrate(to, tell=heard.append)
        assert events == heard and [e["event"] for e in events][-2:] == ["pause", "done"], events
        outcome, why = 0, ""
    except kedge.Error as error:
        outcome, why = -1, str(error)
    if address.value:
        assert cuda.cuMemcpyDtoH_v2(ctypes.byref(found), address, ctypes.c_size_t(4)) == 0
    print(outcome, "same" if found.value == number.value else "none", why, flush=True)
sys.exit(6)
