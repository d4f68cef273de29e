"""How a program in bench/ ends: its JSON document in a line, and in a file where one is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def keep(result: dict[str, Any], out: Path | None) -> None:
    """Print the document as the last line, and keep it in the file `out`."""
    document = json.dumps(result)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(document + "\n")
    print(document)
