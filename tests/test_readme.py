"""The README keeps to what is there: settings, folders, commands, and its own length.

`python -m tests.test_readme` writes the settings table anew, from the settings classes.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path

from cli.settings import SETTINGS_CLASSES, settings_classes
from storage.config import variable
from tests.test_packages import CHECKOUT, PACKAGES, sources

README = CHECKOUT / "README.md"
START, END = "<!-- settings -->\n", "<!-- /settings -->"
WORDS = 700


def rows() -> Iterator[tuple[str, str, str]]:
    """(variable, default, meaning) of every setting, in the order of the classes."""
    for cls in settings_classes():
        for field in fields(cls):
            if help_line := field.metadata.get("help"):
                yield variable(field.name), shown(field), help_line


def shown(field: Field[object]) -> str:
    assert field.default is not MISSING, f"{field.name} has no default"
    default = field.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return f"`{default}`" if str(default) else ""


def settings_table() -> str:
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {default} | {meaning.replace('|', chr(92) + '|')} |"
        for name, default, meaning in dict.fromkeys(rows())
    ]
    return "\n".join(lines) + "\n"


def parts() -> tuple[str, str, str]:
    """The README before its settings table, the table, and what follows it."""
    before, _, rest = README.read_text().partition(START)
    table, _, after = rest.partition(END)
    return before, table, after


def classes_with_settings(path: Path) -> Iterator[str]:
    """`module:Class` of each class in the file that has a field made by `setting(...)`."""
    module = ".".join(path.with_suffix("").parts)
    for node in ast.walk(ast.parse((CHECKOUT / path).read_text())):
        if isinstance(node, ast.ClassDef):
            values = [line.value for line in node.body if isinstance(line, ast.AnnAssign)]
            if any(isinstance(v, ast.Call) and getattr(v.func, "id", "") == "setting" for v in values):
                yield f"{module}:{node.name}"


def test_the_settings_table_is_what_the_settings_classes_say() -> None:
    assert parts()[1] == settings_table(), "run `python -m tests.test_readme`"


def test_every_class_with_settings_is_listed() -> None:
    found = {name for path in sources() for name in classes_with_settings(path)}
    assert found == set(SETTINGS_CLASSES)


def test_no_variable_means_two_things() -> None:
    """Two classes may share a variable only where they agree on what it is."""
    names = Counter(name for name, _, _ in set(rows()))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_text_without_the_settings_table_has_at_most_700_words() -> None:
    before, _, after = parts()
    assert sum(any(map(str.isalnum, word)) for word in (before + after).split()) <= WORDS


def test_the_tree_names_each_folder_and_only_folders_that_are_there() -> None:
    named = set(re.findall(r"^ *([a-z]+)/ ", README.read_text(), re.MULTILINE))
    inner = {path.parent.name for path in CHECKOUT.glob("*/*/__init__.py") if path.parts[-3] in PACKAGES}
    assert named == {*PACKAGES, "tests", *inner}


def test_every_command_that_the_readme_shows_is_there() -> None:
    from cli.main import app

    commands = {c.name or str(getattr(c.callback, "__name__", "")).replace("_", "-") for c in app.registered_commands}
    commands |= {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}
    shown = set(re.findall(r"(?:`|bin/|exec serve )redraft ([a-z]+)", README.read_text()))
    assert shown
    assert shown <= commands
    targets = set(re.findall(r"^([a-z]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", README.read_text(), re.MULTILINE)) <= targets


if __name__ == "__main__":
    text_before, _, text_after = parts()
    README.write_text(text_before + START + settings_table() + END + text_after)
