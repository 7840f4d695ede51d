"""Reads the sources inside a wheel, without installing it, and holds them against what redraft relies on.

A contract is a line:

    Class.method(self, a, b)    it takes these first; whatever more it takes has a default
    function(...)               it is there, whatever it takes
    Class.field                 an annotated field, a property, a method, or set on `self`
    field                       a name of the module
    route /path                 some decorator has this path
    text some words             the source has these words, each run of blanks for any other
    abstract Class = a b c      these methods are abstract, and no others
"""

import ast
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Moved(AssertionError):
    """A wheel is not as redraft relies on it; the message names what moved, and who relies on it."""


@dataclass(frozen=True)
class Wheel:
    """One wheel file."""

    path: Path

    @property
    def name(self) -> str:
        """Such as `vllm 0.33.0`."""
        project, version = self.path.name.split("-")[:2]
        return f"{project} {version}"

    def module(self, member: str) -> "Module":
        """A source file. Raises `Moved`."""
        return _module(self, member)


@dataclass(frozen=True)
class Module:
    """One source file of a wheel."""

    wheel: Wheel
    member: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def holds(self, contract: str) -> None:
        """Raises `Moved`."""
        kind, _, rest = contract.partition(" ")
        problem = {"route": self._route, "text": self._text, "abstract": self._abstract}.get(kind, self._name)(
            rest if kind in ("route", "text", "abstract") else contract
        )
        if problem:
            raise Moved(f"{self.wheel.name}, {self.member}: {problem}")

    def _route(self, path: str) -> str:
        paths = {
            constant.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for decorator in node.decorator_list
            for constant in ast.walk(decorator)
            if isinstance(constant, ast.Constant)
        }
        return "" if path in paths else f"no route {path} any more"

    def _text(self, words: str) -> str:
        pattern = r"\s+".join(map(re.escape, words.split()))
        return "" if re.search(pattern, self.text) else f"it does not say {words!r} any more"

    def _abstract(self, contract: str) -> str:
        name, _, methods = contract.partition(" = ")
        found = self._find(name)
        if not isinstance(found, ast.ClassDef):
            return f"no class {name} any more"
        abstract = {
            node.name
            for node in found.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
        }
        differ = abstract ^ set(methods.split())
        return f"the abstract methods of {name} differ: {', '.join(sorted(differ))}" if differ else ""

    def _name(self, contract: str) -> str:
        dotted, called, arguments = contract.partition("(")
        if called:
            found = self._find(dotted)
            if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
                return f"no function {dotted} any more"
            return _differing(dotted, found.args, arguments.rstrip(")"))
        owner, _, field = dotted.rpartition(".")
        place = self._find(owner) if owner else self.tree
        if place is None:
            return f"no class {owner} any more"
        return "" if field in set(_names(place)) else f"no {dotted} any more"

    def _find(self, dotted: str) -> Defined | None:
        """A class or function by its dotted name, wherever in the module's own conditions it stands."""
        place: ast.AST = self.tree
        for part in dotted.split("."):
            found = next((node for node in _defined(place) if node.name == part), None)
            if found is None:
                return None
            place = found
        assert isinstance(place, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        return place


@cache
def _module(wheel: Wheel, member: str) -> Module:
    with zipfile.ZipFile(wheel.path) as archive:
        try:
            return Module(wheel, member, archive.read(member).decode())
        except KeyError:
            raise Moved(f"{wheel.name} has no {member} any more") from None


def _defined(place: ast.AST) -> Iterator[Defined]:
    """What is defined directly in a module or class, within conditions too."""
    for node in ast.iter_child_nodes(place):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _defined(node)


def _differing(name: str, found: ast.arguments, wanted: str) -> str:
    """What a call with these arguments would run into."""
    if wanted == "...":
        return ""
    names = [argument.arg for argument in (*found.posonlyargs, *found.args)]
    required = {
        argument.arg for argument, default in zip(found.kwonlyargs, found.kw_defaults, strict=True) if not default
    }
    required |= set(names[: len(names) - len(found.defaults)])
    asked = [part.strip() for part in wanted.split(",") if part.strip()]
    taken = {*names, *(argument.arg for argument in found.kwonlyargs)}
    gone = [argument for argument in asked if argument not in taken and not found.kwarg]
    more = sorted(required - set(asked))
    order = [argument for argument in asked if argument in names] != [name for name in names if name in asked]
    told = []
    told += [f"takes no {argument} any more" for argument in gone]
    told += [f"wants {argument} too" for argument in more]
    told += ["takes its arguments in another order"] if order and not gone else []
    return f"{name} {' and '.join(told)}" if told else ""


def _names(place: ast.AST) -> Iterator[str]:
    """Everything that is a name of a module or a class: defined, assigned, or set on `self` by its methods."""
    for node in ast.walk(place) if isinstance(place, ast.ClassDef) else ast.iter_child_nodes(place):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name for target in targets for name in _assigned(target))
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)


def _assigned(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        yield target.attr
    elif isinstance(target, ast.Tuple):
        for part in target.elts:
            yield from _assigned(part)
