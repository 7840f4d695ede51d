"""An engine's counters, over its restarts, and whose they are."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine

from service.hosts.sidecar.counters import Growth, growth, parse
from service.hosts.sidecar.engine_client import EngineClient
from service.hosts.sidecar.history import row_of, row_of_totals
from service.hosts.sidecar.reading import Totals
from service.hosts.sidecar.scraper import Scraper
from storage.history import add, by_version
from tests.storage.rows import make_record
from tests.waiting import until


def _page(prefix: str, drafts: int, proposed: int, accepted: int, positions: list[int], started: float = 1.0) -> str:
    lines = [f"process_start_time_seconds {started}", "# TYPE unrelated counter", "unrelated_total 5"]
    for name, value in (("num_drafts", drafts), ("num_draft_tokens", proposed), ("num_accepted_tokens", accepted)):
        lines += [
            f"# TYPE {prefix}spec_decode_{name} counter",
            f'{prefix}spec_decode_{name}_total{{engine="0"}} {value}',
        ]
    per_position = f"{prefix}spec_decode_num_accepted_tokens_per_pos"
    lines.append(f"# TYPE {per_position} counter")
    lines += [f'{per_position}_total{{engine="0",position="{at}"}} {value}' for at, value in enumerate(positions)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("prefix", ["vllm:", "llamacpp:"])
def test_what_was_counted_in_between_is_the_difference(prefix: str) -> None:
    before = parse(_page(prefix, 100, 300, 150, [90, 40, 20]))
    after = parse(_page(prefix, 110, 330, 162, [97, 44, 21]))
    grown = growth(before, after)
    assert grown == Growth(10, 30, 12, (7, 4, 1))
    assert grown.histogram == (3, 3, 3, 1)
    assert grown.k == 3


def test_counters_that_fell_were_reset_and_count_from_zero() -> None:
    before, after = parse(_page("vllm:", 100, 300, 150, [90])), parse(_page("vllm:", 4, 12, 3, [3], started=2.0))
    assert growth(before, after) == Growth(4, 12, 3, (3,))


def test_a_restarted_engine_that_counted_past_the_old_figures_is_still_counted_from_zero() -> None:
    before, after = parse(_page("vllm:", 10, 30, 9, [9])), parse(_page("vllm:", 12, 36, 11, [11], started=2.0))
    assert growth(before, after) == Growth(12, 36, 11, (11,))


def test_the_first_reading_counts_nothing() -> None:
    assert growth(None, parse(_page("vllm:", 100, 300, 150, [90]))) == Growth()


def test_a_page_without_speculation_counts_nothing() -> None:
    page = parse("# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total 7\n")
    assert not page.counters
    assert growth(page, page) == Growth()


def test_sglang_s_gauges_and_verify_calls_are_read() -> None:
    text = '# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length{tp_rank="0"} 2.5\n'
    text += "# TYPE sglang:spec_verify_calls counter\nsglang:spec_verify_calls_total 9\n"
    page = parse(text)
    assert page.gauges == {"sglang:spec_accept_length": 2.5}
    assert page.counters


@contextmanager
def _pages() -> Iterator[tuple[str, list[str]]]:
    """A server whose /metrics is the last page of the list."""
    pages = [""]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[-1].encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", pages
    server.shutdown()
    server.server_close()


def test_figures_go_to_the_version_that_served_and_those_of_a_swap_to_nobody() -> None:
    kept: list[tuple[int, Growth]] = []
    version = [1]
    with _pages() as (url, pages):
        client = EngineClient(lambda: url)
        scraper = Scraper(client, 5.0, lambda: version[0], lambda v, grown: kept.append((v, grown)))
        pages.append(_page("vllm:", 10, 30, 5, [5]))
        scraper.look()
        pages.append(_page("vllm:", 14, 42, 6, [6]))
        scraper.look()  # right before the swap
        pages.append(_page("vllm:", 15, 45, 6, [6]))  # during it
        scraper.forget()
        version[0] = 2
        pages.append(_page("vllm:", 18, 54, 12, [9]))
        scraper.look()
        client.close()
    assert kept == [(1, Growth(4, 12, 1, (1,))), (2, Growth(3, 9, 6, (3,)))]
    assert scraper.totals[1].drafts == 4


def test_an_engine_that_was_started_again_is_noticed() -> None:
    again: list[bool] = []
    with _pages() as (url, pages):
        client = EngineClient(lambda: url)
        scraper = Scraper(client, 0.01, lambda: 1, restarted=lambda: again.append(True))
        pages.append(_page("vllm:", 10, 30, 5, [5]))
        scraper.start()
        until(lambda: scraper.gauges == {} and scraper._last is not None)
        pages.append(_page("vllm:", 1, 3, 0, [0], started=2.0))
        until(lambda: again == [True])
        scraper.close()
        client.close()


def test_an_engine_without_a_page_holds_nothing_up() -> None:
    client = EngineClient(lambda: "http://127.0.0.1:9")
    assert Scraper(client, 5.0, lambda: 1).look() is None
    client.close()


@pytest.mark.parametrize("page", ["<html></html>", 'total{b="c", ="e"{ 1.0 12}\n'])
def test_a_page_of_another_form_holds_nothing_up(page: str) -> None:
    with _pages() as (url, pages):
        client = EngineClient(lambda: url)
        pages.append(page)
        assert Scraper(client, 5.0, lambda: 1).look() is None
        client.close()


def test_counted_figures_stand_in_the_history_by_version(engine: Engine) -> None:
    moment = datetime(2026, 11, 30, 4, 5, 6, tzinfo=UTC)
    for _ in range(2):
        add(engine, "d", row_of(3, Growth(10, 30, 12, (7, 4, 1)), True, moment))
    (row,) = by_version(engine, "d")
    assert (row.version, row.workload, row.policy, row.k) == (3, "all", "all", 3)
    assert (row.rounds, row.proposed, row.accepted, row.histogram) == (20, 60, 24, (6, 6, 6, 2))
    assert row.acceptance_length == 2.2


def test_those_of_an_engine_that_may_be_lossy_say_so(engine: Engine) -> None:
    add(engine, "d", row_of(3, Growth(10, 30, 12, (7, 4, 1)), False))
    (row,) = by_version(engine, "d")
    assert (row.policy, row.lossless) == ("all lossy", False)


def test_the_sums_of_one_request_stand_in_the_history_as_its_own() -> None:
    row = row_of_totals(make_record("r", tokens=20), 4, Totals(6, 18, 9, (1, 2, 2, 1)))
    assert (row.version, row.workload, row.policy, row.requests) == (4, "code", "greedy", 1)
    assert (row.k, row.rounds, row.proposed, row.accepted, row.histogram) == (3, 6, 18, 9, (1, 2, 2, 1))
    assert row_of_totals(make_record("r"), None, Totals(2, 8, 3, ())).histogram == (0, 0, 0, 0, 0)
