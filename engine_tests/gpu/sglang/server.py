"""`sglang.launch_server` with the plugin and the OpenAI client: concurrent streams, aborts in the middle, bad requests,
an abort storm, a restart; after each the pools hold what they held at the start. server.py FOLDER"""

from __future__ import annotations

import asyncio
import glob
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from openai import APIStatusError, AsyncOpenAI

STREAMS, NEW, PORT = 64, 64, 31555
URL = f"http://127.0.0.1:{PORT}"


def start(log: Path, extra: list[str]) -> subprocess.Popen[bytes]:
    """A server that answers."""
    model = os.path.join(os.environ["WORK"], "models", "inkling")
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--load-format", "dummy",
        "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "16", "--chunked-prefill-size", "256",
        "--max-running-requests", "24", "--context-length", "2048", "--random-seed", "1",
        "--mem-fraction-static", "0.5", "--max-mamba-cache-size", "200", "--max-total-tokens", "32768",
        "--skip-server-warmup",
        "--host", "127.0.0.1", "--port", str(PORT), "--served-model-name", "inkling", *extra,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True)
    until = time.time() + 150
    while time.time() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/v1/models", timeout=5):
                return process
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"no server: {log.read_text(errors='replace')[-3000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def flush() -> dict[str, Any]:
    """Flush the cache of an idle server; what the pools held before, as the probe saw it."""
    for _ in range(60):
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{URL}/flush_cache", method="POST"), timeout=30):
                break
        except urllib.error.HTTPError:
            time.sleep(0.5)
    found: list[dict[str, Any]] = []
    for file in glob.glob(os.environ["PROBE"] + ".*"):
        found += json.loads(Path(file).read_text())["pools"]
    before = [row for row in found if row["when"] == "before"]
    return before[-1]


def leaks(held: dict[str, Any]) -> list[str]:
    """What an idle server still holds."""
    problems = []
    if held["free_request_rows"] != held["request_rows"]:
        problems.append(f"{held['request_rows'] - held['free_request_rows']} request rows are held")
    free = held["mamba_available_size"] + held["mamba_evictable_size"]
    if free != held["mamba_slots"]:
        problems.append(f"{held['mamba_slots'] - free} state slots are held")
    return problems


def prompt(i: int) -> str:
    return " ".join(f"t{(7 * i + 3 * j + j * j) % 500 + 2}" for j in range(1 + 37 * i % 300))


async def stream(client: AsyncOpenAI, i: int, stop_after: int | None = None) -> str:
    """One request's text; closed in the middle where asked."""
    answer = await client.completions.create(
        model="inkling",
        prompt=prompt(i),
        max_tokens=NEW,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    parts: list[str] = []
    async for chunk in answer:
        parts.append(chunk.choices[0].text if chunk.choices else "")
        if stop_after is not None and len(parts) >= stop_after:
            await answer.close()
            break
    return "".join(parts)


async def aborted(client: AsyncOpenAI, i: int, after: float) -> None:
    task = asyncio.create_task(stream(client, i))
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def concurrent(client: AsyncOpenAI) -> dict[str, Any]:
    """Every fourth stream is closed in the middle; the others give what they give alone."""
    tasks = [stream(client, i, stop_after=3 + i % 9 if i % 4 == 3 else None) for i in range(STREAMS)]
    start = time.time()
    texts = await asyncio.gather(*tasks)
    took = time.time() - start
    whole = [i for i in range(STREAMS) if i % 4 != 3]
    words = sum(len(texts[i].split()) for i in whole)
    again = [await stream(client, i) for i in whole[:6]]
    same = sum(a == texts[i] for a, i in zip(again, whole, strict=False))
    return {"streams": STREAMS, "closed": STREAMS - len(whole), "seconds": took, "words": words, "same_alone": same,
            "asked_alone": len(again), "full_length": sum(len(texts[i].split()) == NEW for i in whole)}  # fmt: skip


async def bad(client: AsyncOpenAI) -> dict[str, Any]:
    """Requests that cannot be served are answered, and the server serves on."""
    refused = 0
    for fields in ({"max_tokens": -5}, {"prompt": "t7 " * 4000}, {"temperature": -1.0}, {"top_p": 5.0}):
        given = {"model": "inkling", "prompt": "t7 t8", "max_tokens": 8, **fields}
        try:
            await client.completions.create(**given)
        except APIStatusError as error:
            refused += error.status_code == 400
    return {"asked": 4, "refused": refused, "then": len((await stream(client, 5)).split())}


async def storm(client: AsyncOpenAI) -> dict[str, Any]:
    """Requests that leave at once, three times as many as run."""
    draw = random.Random(3)
    await asyncio.gather(*(aborted(client, i, draw.random() * 0.4) for i in range(3 * STREAMS)))
    return {"aborted": 3 * STREAMS, "then": len((await stream(client, 6)).split())}


async def session(client: AsyncOpenAI) -> dict[str, Any]:
    found: dict[str, Any] = {"start": flush()}
    for work in (concurrent, bad, storm):
        found[work.__name__] = await work(client)
        await asyncio.sleep(1.0)
        held = flush()
        found[work.__name__] |= {"held": held, "leaks": leaks(held)}
        print(work.__name__, {k: v for k, v in found[work.__name__].items() if k != "held"}, flush=True)
    found["text"] = await stream(client, 5)
    return found


def check(found: dict[str, Any], restarted: str) -> list[str]:
    problems = [f"{part}: {leak}" for part in ("concurrent", "bad", "storm") for leak in found[part]["leaks"]]
    for part in ("concurrent", "bad", "storm"):
        grown = found[part]["held"]["bytes"] - found["concurrent"]["held"]["bytes"]
        if part != "concurrent" and grown > 16 << 20:
            problems.append(f"{part}: {grown} bytes of device memory more than after the first work")
    c, b, s = found["concurrent"], found["bad"], found["storm"]
    if c["full_length"] != c["streams"] - c["closed"]:
        problems.append(f"{c['full_length']} of {c['streams'] - c['closed']} streams came to their end")
    if c["same_alone"] != c["asked_alone"]:
        problems.append(f"{c['same_alone']} of {c['asked_alone']} texts are the same alone")
    if b["refused"] < 2 or b["then"] != NEW or s["then"] != NEW:
        problems.append(f"bad requests {b}, storm {s['then']} words")
    if restarted != found["text"]:
        problems.append("the restarted server gives another text")
    return problems


def main(folder: Path) -> int:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
    first = start(folder / "server.log", sys.argv[2:])
    try:
        found = asyncio.run(session(client))
    finally:
        stop(first)
    second = start(folder / "server_again.log", sys.argv[2:])
    try:
        text = asyncio.run(stream(AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120), 5))
    finally:
        stop(second)
    found["problems"] = check(found, text)
    (folder / "server.json").write_text(json.dumps(found, indent=1) + "\n")
    print("server:", found["problems"] or "no problem")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
