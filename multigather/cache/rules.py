"""The heuristic for what nobody measured, read on first use.

``tuning_cache/default.json`` is an ordered list of rules, each a backend and a config for the
gathers that meet its conditions.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..fork import no_fork
from ..request import Request

RULES_FILE = "default.json"
CONDITIONS = ("min_call_bytes", "max_call_bytes", "min_row_bytes", "max_row_bytes")


@dataclass(frozen=True)
class Rule:
    """One entry: for gathers like this, this backend with these knobs.

    Attributes:
        device: device type, or "any".
        backend: name of the backend.
        when: conditions out of `CONDITIONS`, in bytes; a call's bytes are its number of indices
            times the bytes of one row of all buffers. All must hold.
        knobs: the backend's config.
        origin: file and place, for `explain`.
    """

    device: str
    backend: str
    when: dict[str, int]
    knobs: dict[str, Any]
    origin: str

    def matches(self, request: Request) -> bool:
        """Whether the rule is for this request."""
        row, call = request.row_bytes, request.row_bytes * request.count
        when = self.when
        return (
            self.device in (request.device.type, "any")
            and when.get("min_call_bytes", 0) <= call <= when.get("max_call_bytes", call)
            and when.get("min_row_bytes", 0) <= row <= when.get("max_row_bytes", row)
        )


@functools.cache
def default_rules() -> tuple[Rule, ...]:
    """The shipped heuristic.

    Raises:
        ValueError: the file names an unknown condition.
    """
    with no_fork:
        folder = resources.files("multigather.tuning_cache")
    text = (folder / RULES_FILE).read_text()
    rules = []
    for number, entry in enumerate(json.loads(text)["rules"]):
        unknown = set(entry["when"]) - set(CONDITIONS)
        if unknown:
            raise ValueError(f"{RULES_FILE}, rule {number}: unknown conditions {sorted(unknown)}")
        origin = f"heuristic, rule {number} of {RULES_FILE}"
        rules.append(
            Rule(entry["device"], entry["backend"], entry["when"], entry["config"], origin)
        )
    return tuple(rules)
