"""Talks to a running server through SGLang's own routes: `/set_internal_state` to ask, `/server_info` to look."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from sglang_persist.errors import EngineOff, EngineUnreachable, SnapshotFailed

POLL_S = 0.1
_MEMBERS = {"enabled", "why_off", "rank", "namespace", "restore", "snapshot", "store"}


class Client:
    def __init__(self, url: str, api_key: str | None = None, timeout: float = 60.0):
        self.url = (url if "//" in url else f"http://{url}").rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout

    def _call(self, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            text = " ".join(error.read(300).decode(errors="replace").split())
            raise EngineUnreachable(f"{self.url}{path}: HTTP {error.code} {text}".rstrip()) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise EngineUnreachable(f"{self.url}{path}: {' '.join(str(reason).split())}") from None

    def status(self) -> list[dict]:
        """STATUS of each DP replica. Raises EngineOff where the server does not persist, EngineUnreachable."""
        info = self._call("/server_info")
        states = info.get("internal_states") if isinstance(info, dict) else None
        if not isinstance(states, list):
            raise EngineUnreachable(f"{self.url}/server_info: not the answer of an SGLang server")
        found = [s.get("persist") for s in states if isinstance(s, dict)]
        if not found or None in found:
            why = "no_directory: the server runs without --persist-dir, or without the plugin"
            raise EngineOff(f"{self.url}: persistence is off: why_off={why}")
        if not all(isinstance(s, dict) and s.keys() >= _MEMBERS for s in found):
            raise EngineUnreachable(f"{self.url}/server_info: the status of another version of sglang-persist")
        return found

    def snapshot(self, wait: bool = True, progress: Callable[[list[dict]], None] = lambda ranks: None) -> list[dict]:
        """Ask every replica for a snapshot; with `wait`, return each one's result once it is durable."""
        self._require_on(self.status())
        if not all(self._call("/set_internal_state", {"server_args": {"persist_snapshot": 1}})):
            self._require_on(self.status())
            raise SnapshotFailed(f"{self.url}: the server did not accept the request")
        # Requests are numbered as they arrive, so a number read after ours was taken covers ours.
        ranks = self.status()
        wanted = {s["rank"]: s["snapshot"]["requested"] for s in ranks}
        while wait and any(s["snapshot"]["last_request"] < wanted[s["rank"]] for s in ranks):
            self._require_on(ranks)
            if any(s["snapshot"]["requested"] < wanted[s["rank"]] for s in ranks):
                raise SnapshotFailed(f"{self.url}: the server was restarted meanwhile")
            progress(ranks)
            time.sleep(POLL_S)
            ranks = self.status()
        errors = {s["rank"]: s["snapshot"]["last_request_error"] for s in ranks}
        failed = [f"rank {rank}: {error}" for rank, error in errors.items() if error]
        if wait and failed:
            raise SnapshotFailed(f"{self.url}: {'; '.join(failed)}")
        return [_result(s) for s in ranks]

    def _require_on(self, ranks: list[dict]) -> None:
        off = [f"rank {s['rank']}: why_off={s['why_off']}" for s in ranks if not s["enabled"]]
        if off:
            raise EngineOff(f"{self.url}: persistence is off: {'; '.join(off)}")


def _result(status: dict) -> dict:
    last = status["snapshot"]
    return {
        "rank": status["rank"],
        "generation": last["generation"],
        "tokens": last["last_tokens"] or 0,
        "new_tokens": last["last_new_tokens"] or 0,
        "new_bytes": last["last_new_bytes"] or 0,
        "seconds": last["last_seconds"] or 0.0,
    }
