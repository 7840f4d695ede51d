"""Log lines: one form for ours and the libraries', without text of users and without passwords."""

import json
import logging

import pytest
import structlog

from cli.logs import LogConfig, configure

LIBRARY = logging.getLogger("some.library")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_ours_and_the_librarys_lines_have_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(log="json"))
    structlog.get_logger("ours").info("candidate.promoted", version=3)
    LIBRARY.warning("retry %d", 2)
    ours, theirs = lines(capsys)
    assert (ours["event"], ours["version"], ours["level"], ours["logger"]) == ("candidate.promoted", 3, "info", "ours")
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("retry 2", "warning", "some.library")
    assert ours["timestamp"].endswith("Z")


def test_what_users_wrote_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(log="json"))
    structlog.get_logger().info("request.failed", prompt="my secret", token_ids=[1, 2], request_id="r1")
    (line,) = lines(capsys)
    assert line["request_id"] == "r1"
    assert not {"prompt", "token_ids"} & line.keys()


def test_passwords_in_urls_are_blotted(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(log="json"))
    LIBRARY.error("cannot connect to redis://:hunter2@host:6379/0 nor postgresql://me:hunter2@host/db")
    (line,) = lines(capsys)
    assert line["event"] == "cannot connect to redis://:***@host:6379/0 nor postgresql://me:***@host/db"


def test_a_traceback_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(log="json"))
    try:
        raise ValueError("broken")
    except ValueError:
        LIBRARY.exception("task.failed")
    (line,) = lines(capsys)
    assert "ValueError: broken" in line["exception"]


def test_the_console_form_is_for_people_and_the_level_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(log="console", log_level="WARNING"))
    structlog.get_logger().info("too.quiet")
    structlog.get_logger().warning("loud.enough", version=3)
    written = capsys.readouterr().err
    assert "too.quiet" not in written
    assert "loud.enough" in written
    assert "version=3" in written
