"""What is kept is made once, and never believed when it is damaged."""

from pathlib import Path

from benchmarks.kept import kept


def test_it_is_made_once_for_a_key_and_again_for_another(tmp_path: Path) -> None:
    made: list[str] = []

    def make() -> list[int]:
        made.append("x")
        return [1, 2]

    for key in (["a", 1], ["a", 1], ["a", 2]):
        assert kept(tmp_path / "new", "numbers", key, list[int], make) == [1, 2]
    assert len(made) == 2


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    kept(tmp_path, "numbers", "key", list[int], lambda: [1])
    (file,) = tmp_path.iterdir()
    for damage in (b"", b"\x93\x01", b"\xa1a"):
        file.write_bytes(damage)
        assert kept(tmp_path, "numbers", "key", list[int], lambda: [2]) == [2]
    assert list(tmp_path.iterdir()) == [file]
