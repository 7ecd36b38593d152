"""Ways to damage a file."""

from pathlib import Path
from random import Random


def flip_a_bit(file: Path) -> None:
    content, random = bytearray(file.read_bytes()), Random(file.name)
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def flip_the_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garbage(file: Path) -> None:
    file.write_bytes(Random(0).randbytes(file.stat().st_size))


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def delete(file: Path) -> None:
    file.unlink()


def turn_into_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = (flip_a_bit, flip_the_last_bit, truncate, empty, garbage, lengthen, delete, turn_into_a_folder)
