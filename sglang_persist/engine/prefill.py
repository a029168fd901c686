"""How fast the engine computes prompts, learned from the passes of its loop."""

from __future__ import annotations

#: Prompt tokens below which a pass says little of it.
LEAST_TOKENS = 128
#: Seconds of prefill after which what was measured before counts half.
HALF_LIFE = 60.0


class PrefillRate:
    """`seen` once a pass, with the batch that the last pass ran and the seconds since the last call.

    A loop that overlaps launches a batch in one pass and waits for it in the next: there, the pass after a run of
    prefills still belongs to them.
    """

    def __init__(self, overlap: bool):
        self._overlap = overlap
        self._tokens, self._seconds = 0, 0.0
        self.tokens, self.seconds = 0.0, 0.0

    def seen(self, batch, passed: float) -> None:
        tokens = _prompt_tokens(batch)
        if tokens:
            self._tokens += tokens
            self._seconds += passed
        elif self._tokens:
            if self._overlap:
                self._seconds += passed
            if self._tokens >= LEAST_TOKENS:
                self.tokens += self._tokens
                self.seconds += self._seconds
                if self.seconds > HALF_LIFE:
                    self.tokens, self.seconds = self.tokens / 2, self.seconds / 2
            self._tokens, self._seconds = 0, 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 as long as nothing is known."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def _prompt_tokens(batch) -> int:
    mode = getattr(batch, "forward_mode", None)
    if mode is None or not mode.is_extend():
        return 0
    return int(getattr(batch, "extend_num_tokens", 0) or 0)
