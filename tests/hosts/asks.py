# As asks.c, by the Python module.
import sys

import kedge

until = kedge.Until(sys.argv[1])
for turn in range(1, 4):
    try:
        outcome, why = {kedge.GOES_ON: 0, kedge.RESTARTED: 1}[kedge.checkpoint(until)], ""
    except kedge.Error as error:
        outcome, why = -1, str(error)
    print(turn, outcome, why, flush=True)
    if not sys.stdin.readline():
        sys.exit(4)
sys.exit(6)
