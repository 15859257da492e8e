"""Run a program as on Windows: `python without_posix.py PROGRAM ARGUMENTS`, without what Windows lacks of Python.

It is deleted once Python's own modules, which are others there, are imported.
"""

# ruff: noqa: F401
import asyncio
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile

import accelerate
import datasets
import evaluate
import matplotlib.pyplot
import psutil
import torch
import transformers

for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGQUIT", "pthread_sigmask", "setitimer"):
    delattr(signal, name)
for name in ("sysconf", "fork", "getuid", "geteuid", "killpg", "getpgid", "sched_getaffinity"):
    delattr(os, name)
sys.modules.update(dict.fromkeys(("resource", "fcntl", "termios", "grp")))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
