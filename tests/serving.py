"""Starts, drives and ends a real SGLang server in the CPU runtime, for the tests, the demo and the benchmarks."""

import atexit
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "scripts" / "cpu_runtime"
READY = "The server is fired up and ready to roll!"


@dataclass(frozen=True)
class Answer:
    text: str
    ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    meta: dict = field(repr=False)


class Server:
    """One server at a time on a small machine; entered, it is ready. It may be stopped and started again."""

    def __init__(self, model_dir, *args, env=None, max_tokens=16384, python=None):
        self.args = ["--model-path", model_dir, "--max-total-tokens", max_tokens, *args]
        self.env = env or {}
        self.python = python or sys.executable
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.kill()

    def start(self, timeout=300) -> float:
        """Seconds until it is ready. The log says so: a request to /health would leave its token in the cache."""
        began = time.monotonic()
        self.port = _free_port()
        logs = ROOT / ".cache" / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f"server-{self.port}-", suffix=".log", dir=logs)
        self.log = Path(name)
        command = [self.python, RUNTIME / "launch.py", "--host", "127.0.0.1", "--port", self.port, *self.args]
        with os.fdopen(descriptor, "wb") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A parent that was itself started in the background hands it down ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        atexit.register(self.kill)
        self.wait_for(READY, timeout=timeout)
        return time.monotonic() - began

    def wait_for(self, line: str, times: int = 1, timeout=300) -> None:
        """Until the log has a line so many times: of some things that is all that a server tells."""
        began = time.monotonic()
        while self.log.read_text(errors="replace").count(line) < times:
            if self.process.poll() is not None:
                self._fail(f"ended with {self.process.returncode} before it said {line!r}")
            if time.monotonic() - began > timeout:
                self._fail(f"did not say {line!r} within {timeout} s")
            time.sleep(0.1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tail(self, characters=3000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    def get(self, path, timeout=300):
        return self._call(urllib.request.Request(self.url + path), timeout)

    def post(self, path, json_body=None, timeout=300):
        body = json.dumps(json_body).encode() if json_body is not None else b""
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"}, method="POST")
        return self._call(request, timeout)

    def generate(self, prompt, n=1, **extra) -> Answer:
        """Greedy; prompt is a text or a list of token ids, extra is what /generate takes (return_logprob=True, ...)."""
        sampling = {"temperature": 0, "max_new_tokens": n} | extra.pop("sampling_params", {})
        body = {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": sampling, **extra}
        began = time.monotonic()
        answer = self.post("/generate", body)
        seconds = time.monotonic() - began
        meta = answer["meta_info"]
        return Answer(answer["text"], answer["output_ids"], meta["prompt_tokens"], meta["cached_tokens"], seconds, meta)

    def stop(self, sig=signal.SIGTERM, group=False, timeout=90) -> float:
        """Seconds until the launcher has exited and nothing of its session is left."""
        began = time.monotonic()
        (os.killpg if group else os.kill)(self.process.pid, sig)
        while self.process.poll() is None or _alive(self.process.pid):
            if time.monotonic() - began > timeout:
                self._fail(f"was still there {timeout} s after {signal.Signals(sig).name}")
            time.sleep(0.02)
        seconds = time.monotonic() - began
        self.kill()
        return seconds

    def kill(self) -> None:
        """What an OOM kill or a power cut does to it: SIGKILL for every process at once. Also fine when it is gone."""
        atexit.unregister(self.kill)
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while _alive(self.process.pid):
            time.sleep(0.02)
        self.process = None

    def _fail(self, what: str) -> None:
        tail = self.tail()
        self.kill()
        raise RuntimeError(f"the server {what}; the end of {self.log}:\n{tail}")

    def _call(self, request, timeout):
        with urllib.request.urlopen(request, timeout=timeout) as response:
            body = response.read().decode()
        try:
            return json.loads(body)
        except ValueError:
            return body


def _free_port() -> int:
    """Not one of those that the kernel gives to connections: SGLang binds it only half a minute later."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _alive(session: int) -> list[int]:
    """The processes of a session but for zombies, which an init that reaps nothing (a container's) keeps for ever."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # After the name, which may hold anything: state, parent, group, session.
                state, _, _, of = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
                if int(of) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found


def model(kind: str, seed: int = 0) -> Path:
    """The directory of a model of scripts/cpu_runtime/models.py, prepared on first use."""
    command = [sys.executable, str(RUNTIME / "models.py"), kind, str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"could not prepare the model {kind}: {done.stdout}")
    return Path(done.stdout.splitlines()[-1])


@cache
def prose() -> str:
    """English that every Python brings along: the paragraphs of its language reference, about 150,000 characters."""
    from pydoc_data.topics import topics

    paragraphs = (
        " ".join(paragraph.split())
        for name in sorted(topics)
        for paragraph in topics[name].split("\n\n")
        if not paragraph.startswith(" ") and "::=" not in paragraph
    )
    return "\n\n".join(dict.fromkeys(paragraph for paragraph in paragraphs if len(paragraph) > 200))


def prompts(n: int, chars: int, shared: int, offset: int = 0) -> list[str]:
    """n prompts of that many characters of prose: the first `shared` are the same in all, the rest is its own."""
    own = chars - shared
    text = prose()[offset : offset + shared + n * own]
    if len(text) < shared + n * own:
        raise ValueError(f"the prose ends before {n} prompts of {chars} characters from {offset} on")
    return [text[:shared] + text[start : start + own] for start in range(shared, len(text), own)]
