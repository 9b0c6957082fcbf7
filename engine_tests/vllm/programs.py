"""Programs that run vLLM in a process of their own and print one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def answer_of(program: str, *arguments: str, plugin: bool, workers: int = 1) -> tuple[dict[str, Any], str]:
    """What a program beside this file printed behind `RESULT `, and its log. Each of vLLM's workers has a core."""
    environment = {
        **os.environ,
        "HWBACKENDS_VLLM": "1" if plugin else "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(workers))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"vLLM stopped with status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return answer, done.stdout + done.stderr
