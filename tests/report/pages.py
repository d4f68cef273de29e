"""A page as tests read it."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any


def documents(path: Path) -> dict[str, Any]:
    """Return the documents of a report by their addresses within its run."""
    (page,) = re.findall(
        r'<script type="application/json" id="page">(.*?)</script>', path.read_text("utf-8"), re.DOTALL
    )
    every = json.loads(gzip.decompress(base64.b64decode(json.loads(page)["documents"])))
    return {name.partition("/")[2] or name: document for name, document in every.items()}
