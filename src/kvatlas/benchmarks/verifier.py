"""The program behind `judges`: reads pairs of expressions, says whether math-verify finds them equal.

Run as `python -m kvatlas.benchmarks.verifier SECONDS BYTES` in a process of its own, because symbolic algebra on what a
model wrote may take any time and memory. Requests and verdicts are lines of JSON; it ends when its input does.
"""

from __future__ import annotations

import json
import signal
import sys


def main() -> None:
    """Answer requests until there are no more. A request over the time limit ends the process by an alarm."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    # Before any limit: importing costs more than judging, and a kill in the middle of it would look like a verdict.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    extraction = (LatexExtractionConfig(), ExprExtractionConfig())

    def parsed(text: str) -> list[object]:
        # The library's own time limits need the main thread's alarm, which is ours.
        return list(parse(f"${text}$", extraction, parsing_timeout=None))

    def equal(first: str, second: str) -> bool:
        one, other = parsed(first), parsed(second)
        # Either order: an interval and the inequality that means the same are found equal in one of them only.
        return any(verify(a, b, timeout_seconds=None) for a, b in ((one, other), (other, one)))

    _limit_memory(memory)
    # Dies even where nobody is left to kill it.
    for line in sys.stdin:
        _alarm(seconds + 1)
        try:
            verdict: object = equal(*json.loads(line))
        except MemoryError:
            verdict = None
        except Exception:
            verdict = False
        _alarm(0)
        print(json.dumps(verdict), flush=True)


def _alarm(seconds: int) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _limit_memory(size: int) -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    main()
