"""Whether a client's grammar compiles at all, and in time: tried in a process of its own, which the system stops.

Size says little: a schema of a hundred characters (two `multipleOf`) can keep llguidance busy for minutes, and a
thread cannot be stopped. A grammar that passed once is not tried again as long as it is remembered.
"""

import subprocess
import sys
from functools import lru_cache

CPU_SECONDS = 2
MEMORY = 2 << 30  # bytes; on Linux
PATIENCE = 30.0  # seconds on a machine that is busy with other things
REMEMBERED = 256  # grammars

# A tokenizer of single bytes stands for the target's: what takes time are the lexer and the grammar.
TRIAL = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
limits = LLParserLimits(verbose_errors=False)
matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=limits)
matcher.compute_bitmask()
sys.stdout.write(matcher.get_error())
"""


@lru_cache(REMEMBERED)
def trial(grammar: str) -> str:
    """What is wrong with a grammar in llguidance's form; empty where nothing is."""
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", TRIAL],
            input=grammar,
            capture_output=True,
            encoding="utf-8",
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"compiling it takes more than {PATIENCE:.0f} s"
    if ended.returncode != 0:
        return f"compiling it takes more than {CPU_SECONDS} s of a processor or {MEMORY >> 30} GiB of memory"
    return ended.stdout
