"""runner.py PROGRAM SECONDS: runs the program with the arguments of each line of JSON, and answers with one.

What ru_maxrss says of a process includes what it was forked from, so this one imports little.
"""

import json
import os
import resource
import sys
import tempfile


def run(program: str, seconds: int, args: list, user) -> dict:
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.dup2(errors.fileno(), 2)
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            os.execv(program, [program, *args])
        _, status, usage = os.wait4(child, 0)
        errors.seek(0)
        line = errors.read(1 << 20).decode(errors="replace")
    cpu = usage.ru_utime + usage.ru_stime
    return {"status": os.waitstatus_to_exitcode(status), "line": line, "memory": usage.ru_maxrss << 10, "cpu": cpu}


for order in sys.stdin:
    order = json.loads(order)
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), order["args"], order["user"])), flush=True)
