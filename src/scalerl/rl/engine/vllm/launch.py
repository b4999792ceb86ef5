"""Runs vLLM's server in its own environment, and ends with the trainer that started it.

    python -m scalerl.rl.engine.vllm.launch FOLDER ARGUMENTS...

The trainer holds the other end of the standard input. Once that is closed, however the trainer came to its
end, the server and all of its processes are ended (they are a group of their own), and FOLDER, which has its
socket and the weights on their way to it, is removed.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import threading
import time


def _follow_the_trainer(folder: str) -> None:
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)  # it removes its shared memory
    time.sleep(10)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    folder = sys.argv.pop(1)
    threading.Thread(target=_follow_the_trainer, args=(folder,), daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
