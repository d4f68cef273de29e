"""The program behind `judges`: reads pairs of expressions, or one and a text, and has math-verify compare.

Run as `python -m kvatlas.benchmarks.verifier SECONDS BYTES` in a process of its own, because symbolic algebra on what a
model wrote may take any time and memory.
"""

from __future__ import annotations

import sys

from kvatlas.killable import serve


def main() -> None:
    """Answer requests until there are no more. Out of memory the process ends: it is not to be trusted any more."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    # Before any limit: importing costs more than judging, and a kill in the middle of it would look like a verdict.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    extraction = (LatexExtractionConfig(), ExprExtractionConfig())

    def parsed(text: str) -> list[object]:
        # The library's own time limits need the main thread's alarm, which is ours.
        return list(parse(text, extraction, parsing_timeout=None))

    def equal(pair: list[str]) -> bool:
        try:
            reference, text, *whole = pair
            expected, other = parsed(f"${reference}$"), parsed(text if whole else f"${text}$")
            # Either order: an interval and the inequality that means the same are found equal in one of them only.
            return any(verify(a, b, timeout_seconds=None) for a, b in ((expected, other), (other, expected)))
        except MemoryError:
            raise
        except Exception:
            return False

    serve(equal, memory, seconds + 1)


if __name__ == "__main__":
    main()
