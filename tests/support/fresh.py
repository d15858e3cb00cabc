# SPDX-License-Identifier: Apache-2.0
"""Runs programs in processes that have imported torch, but not torchq.

Importing torch is most of the time of a new Python process. Here one process imports it, and forks
for each program. What torch reads when it is loaded, such as OMP_NUM_THREADS, is that of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

SERVER = r"""
import ctypes, json, os, sys, tempfile, traceback
import torch

def run(request, out, err):
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.environ.update(request["environment"])
    sys.path[:0] = request["path"]
    status = 1
    try:
        exec(compile(request["code"], "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush(), ctypes.CDLL(None).fflush(None)
    os._exit(status)

for line in sys.stdin:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            run(json.loads(line), out, err)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0), err.seek(0)
        print(json.dumps([status, out.read().decode(), err.read().decode()]), flush=True)
"""


@cache
def server() -> subprocess.Popen[str]:
    """Ends when the tests end, with its input."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHQ_")}
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def python(code: str, *path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` with `path` in front of the modules' path; TORCHQ_* are only those given."""
    request = {"code": code, "path": path, "environment": environment}
    to, back = server().stdin, server().stdout
    assert to is not None and back is not None
    to.write(json.dumps(request) + "\n")
    to.flush()
    status, out, err = json.loads(back.readline())
    return subprocess.CompletedProcess([code], status, out, err)
