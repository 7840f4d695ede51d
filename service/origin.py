"""Whose tokens a server's records hold, and how much memory its process has. For hosts without torch as well."""

import os
from dataclasses import dataclass
from pathlib import Path

STATM = Path("/proc/self/statm")  # Linux; elsewhere the figure is left out


@dataclass(frozen=True)
class Origin:
    """Whose tokens these are: what every record of one server says."""

    target_fingerprint: str
    tokenizer_fingerprint: str
    drafter: str  # name


def resident_mb() -> float:
    """Resident memory of this process in MB; 0 where the system does not tell."""
    try:
        pages = int(STATM.read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
