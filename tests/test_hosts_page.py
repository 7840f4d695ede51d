"""docs/hosts.md keeps to the table of hosts: its own table, and a heading for each host.

`python -m tests.test_hosts_page` writes the page's table anew.
"""

import re

from service.hosts.capabilities import HOSTS, LEARNT_KINDS, Host
from tests.test_packages import CHECKOUT

PAGE = CHECKOUT / "docs" / "hosts.md"
START, END = "<!-- hosts -->\n", "<!-- /hosts -->"
PARTS = ("**Command", "**Observed", "**A swap", "**Limits")  # how paragraphs begin


def hosts_table() -> str:
    lines = [
        "| host | | rounds | refused tokens | target rows | hidden states | swap | drafters | checked |",
        "|---|---|---|---|---|---|---|---|---|",
        *(line(host) for host in HOSTS.values()),
    ]
    return "\n".join(lines) + "\n"


def line(host: Host) -> str:
    can = host.capabilities
    cells = (
        f"`{host.name}`", f"[{host.title}](#{anchor(host.title)})", can.rounds, said(can.rejected_tokens), can.teacher,
        said(can.hidden_states), can.swap.replace("_", " "), ", ".join(can.kinds),
        f"{host.checked}: {host.how_checked}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def said(holds: bool) -> str:
    return "yes" if holds else "no"


def anchor(title: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def parts() -> tuple[str, str, str]:
    before, _, rest = PAGE.read_text().partition(START)
    table, _, after = rest.partition(END)
    return before, table, after


def test_the_table_is_that_of_the_code() -> None:
    assert parts()[1] == hosts_table(), "run `python -m tests.test_hosts_page`"


def test_every_host_has_its_heading_with_command_observation_swap_and_limits() -> None:
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    for host in HOSTS.values():
        missing = [part for part in PARTS if part not in sections[host.title]]
        assert not missing, f"{host.title} lacks {missing}"


def test_a_host_says_of_every_kind_that_it_serves_it_or_why_not() -> None:
    for host in HOSTS.values():
        kinds = set(host.capabilities.kinds)
        assert kinds.isdisjoint(host.refuses)
        assert kinds | set(host.refuses) >= set(LEARNT_KINDS), host.name


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + START + hosts_table() + END + after)
