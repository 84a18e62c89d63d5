"""Reads counts, bandwidths and times as people write them: 110M, 10Gbit, 50us."""

import math
import re

_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {**_PREFIXES, "b": 1e9}
# In bytes. A small b is a bit, a capital B a byte. Prefixes may have either case.
_RATES = {"bit": 1 / 8, "bit/s": 1 / 8, "bps": 1 / 8, "b/s": 1 / 8, "B": 1.0, "B/s": 1.0}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}


def count(text: str) -> int:
    """A number of elements: 110M, 1.5B, 350k, 1e8 or 110000000.

    Raises:
        ValueError: the text is none of these, or its number is below 1 or not whole.

    >>> count("110M"), count("1.5B"), count("84_000")
    (110000000, 1500000000, 84000)
    """
    number, unit = _split(text.replace("_", "").replace(",", ""))
    factor = _COUNTS.get(unit.lower())
    elements = 0.0 if number is None or factor is None else number * factor
    if not 0.5 < elements < math.inf or not math.isclose(elements, round(elements)):
        raise ValueError(f"{text!r} is no number of elements: write 110M, 1.5B, 350k or 110000000")
    return round(elements)


def bytes_per_second(text: str) -> float:
    """A bandwidth: 10Gbit, 100mbit/s, 25Gbps (bits) or 1.25GB/s (bytes), with powers of 1000.

    Raises:
        ValueError: the text is none of these, or not positive.

    >>> bytes_per_second("10Gbit"), bytes_per_second("100mbit/s"), bytes_per_second("1.25GB/s")
    (1250000000.0, 12500000.0, 1250000000.0)
    """
    number, unit = _split(text)
    for rate, factor in _RATES.items():
        prefix = unit.removesuffix(rate)
        if number and unit.endswith(rate) and prefix.lower() in _PREFIXES:
            return number * _PREFIXES[prefix.lower()] * factor
    raise ValueError(
        f"{text!r} is no bandwidth: write 10Gbit, 100mbit/s or 25Gbps for bits a second, 1.25GB/s "
        "for bytes"
    )


def seconds(text: str) -> float:
    """A time: 50us, 2ms or 0.5s. 0 needs no unit.

    Raises:
        ValueError: the text is none of these.

    >>> seconds("50us"), seconds("2 ms"), seconds("0")
    (5e-05, 0.002, 0.0)
    """
    number, unit = _split(text)
    if number == 0 and not unit:
        return 0.0
    if number is None or unit not in _TIMES:
        raise ValueError(f"{text!r} is no time: write 50us, 2ms or 0.5s")
    # Division by a whole number rounds only once, so that 50us is 5e-05.
    return number / round(1 / _TIMES[unit])


def _split(text: str) -> tuple[float | None, str]:
    found = _NUMBER.fullmatch(text)
    try:
        number = float(found[1]) if found else math.inf
    except ValueError:  # 1.2.3
        number = math.inf
    # 1e400 is infinite, too.
    return (number, found[2]) if found and number < math.inf else (None, text)
