"""`vllm serve` over the tiny LFM2 with the plugin, through the OpenAI client: the tokens of Transformers, bad requests,
an abort storm after which nothing is held, and the same tokens after a restart.

    python served.py FOLDER LOG [vLLM arguments]      FOLDER: made by tiny_lfm2.py
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import APIStatusError, OpenAI

CONCURRENT = 32
LOG_LINE = "hwbackends: vLLM"


def make_tokenizer(folder: Path) -> None:
    """Words t0, t1, ... for the ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", unk_token="t0").save_pretrained(folder)


class Server:
    """`vllm serve` in a process of its own.

    Args:
        folder: the checkpoint.
        log: where its output goes.
        arguments: more of vLLM's.
    """

    def __init__(self, folder: Path, log: Path, arguments: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        command += [
            "--dtype",
            "float32",
            "--max-model-len",
            "256",
            "--max-num-seqs",
            "7",
            "--max-num-batched-tokens",
            "16",
        ]
        environment = {**os.environ, "HWBACKENDS_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self._log, self._begun = log, time.time()
        self._process = subprocess.Popen(
            [*command, "--no-enable-prefix-caching", *arguments],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self.client = OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def get(self, path: str) -> str:
        """The text at an address of the server."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    def wait(self, limit: float = 400.0) -> float:
        """Until it answers; seconds since it was started."""
        while time.time() - self._begun < limit:
            assert self._process.poll() is None, f"vLLM stopped:\n{self._log.read_text()[-4000:]}"
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self.get("/health")
                return time.time() - self._begun
            time.sleep(0.5)
        raise TimeoutError(f"no answer:\n{self._log.read_text()[-4000:]}")

    def tokens(self, prompt: list[int], new: int) -> list[int]:
        """Greedy tokens of one prompt."""
        extra = {"return_token_ids": True, "ignore_eos": True}
        answer: Any = self.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=new, temperature=0, extra_body=extra
        )
        found: list[int] = answer.choices[0].token_ids
        return found

    def held(self) -> dict[str, float]:
        """What the server's own metrics say is running, waiting, or kept in the cache."""
        wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(wanted)]
        return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if "reason" not in line}

    def stop(self) -> None:
        """End it as an operator does."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def refused(server: Server) -> list[int]:
    """HTTP statuses of requests that no server should take."""
    bad: list[dict[str, Any]] = [
        {"model": "tiny", "prompt": [5] * 300, "max_tokens": 3},
        {"model": "tiny", "prompt": [5, 6], "max_tokens": -1},
        {"model": "tiny", "prompt": [5, 1_000_000], "max_tokens": 3},
        {"model": "another", "prompt": [5, 6], "max_tokens": 3},
    ]
    statuses = []
    for request in bad:
        try:
            server.client.completions.create(**request)
            statuses.append(200)
        except APIStatusError as error:
            statuses.append(error.status_code)
    return statuses


def storm(server: Server, prompts: list[list[int]]) -> int:
    """Streams that are closed in the middle, all at once; how many had begun."""

    def one(i: int) -> int:
        prompt = prompts[i % len(prompts)]
        extra = {"ignore_eos": True}
        stream = server.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=200, temperature=0, stream=True, extra_body=extra
        )
        for count, _ in enumerate(stream):
            if count == i % 5:
                break
        stream.close()
        return 1

    with ThreadPoolExecutor(CONCURRENT) as pool:
        return sum(pool.map(one, range(2 * CONCURRENT)))


def main(folder: Path, log: Path, arguments: list[str]) -> None:
    """Serve, disturb, serve again, restart, serve again."""
    expected = json.loads((folder / "expected.json").read_text())
    prompts, wanted = expected["prompts"], expected["tokens"]
    make_tokenizer(folder)
    found: dict[str, Any] = {}
    first: list[list[list[int]]] = []

    def check(server: Server, label: str) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            got = list(pool.map(lambda p: server.tokens(p, len(wanted[0])), prompts))
        first.append(got)
        found[label] = f"{sum(a == b for a, b in zip(got, wanted, strict=True))} of {len(wanted)} equal Transformers'"
        found[label] += "" if got == first[0] else "; others than before"

    server = Server(folder, log, arguments)
    try:
        found["first start, s"] = round(server.wait(), 1)
        check(server, "tokens")
        found["statuses of bad requests"] = refused(server)
        found["aborted streams"] = storm(server, prompts)
        until = time.time() + 60
        while any(server.held().values()) and time.time() < until:
            time.sleep(0.2)
        found["held after the storm"] = server.held()
        check(server, "tokens after the storm")
        found["plugin's line in the log"] = LOG_LINE in log.read_text()
    finally:
        server.stop()
    server = Server(folder, log.with_suffix(".again.log"), arguments)
    try:
        found["second start, s"] = round(server.wait(), 1)
        check(server, "tokens after a restart")
    finally:
        server.stop()
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
