"""Reads counts, bandwidths and times as people write them: 110M, 10Gbit, 50us."""

import math
import re

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {**_PREFIXES, "b": 1e9}
# In bytes. A small b is a bit, a capital B a byte. Prefixes may have either case.
_RATES = {"bit": 1 / 8, "bit/s": 1 / 8, "bps": 1 / 8, "b/s": 1 / 8, "B": 1.0, "B/s": 1.0}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}


def count(text: str) -> int:
    """A whole number of at least 1; ValueError for another text.

    >>> count("110M"), count("1.5B"), count("84_000")
    (110000000, 1500000000, 84000)
    """
    number, unit = _split(text.replace("_", "").replace(",", ""))
    found = number * _COUNTS.get(unit.lower(), math.nan)
    if not 0.5 < found < math.inf or not math.isclose(found, round(found)):
        raise ValueError(f"{text!r} is no number of elements: write 110M, 1.5B, 350k or 110000000")
    return round(found)


def bytes_per_second(text: str) -> float:
    """A bandwidth in bits or bytes, with powers of 1000; ValueError for another text.

    >>> bytes_per_second("10Gbit"), bytes_per_second("100mbit/s"), bytes_per_second("1.25GB/s")
    (1250000000.0, 12500000.0, 1250000000.0)
    """
    number, unit = _split(text)
    for rate, factor in _RATES.items():
        prefix = unit.removesuffix(rate).lower()
        if number > 0 and unit.endswith(rate) and prefix in _PREFIXES:
            return number * _PREFIXES[prefix] * factor
    raise ValueError(
        f"{text!r} is no bandwidth: write 10Gbit, 100mbit/s or 25Gbps for bits a second, 1.25GB/s "
        "for bytes"
    )


def seconds(text: str) -> float:
    """A time, or 0 without a unit; ValueError for another text.

    >>> seconds("50us"), seconds("2 ms"), seconds("0")
    (5e-05, 0.002, 0.0)
    """
    number, unit = _split(text)
    if number == 0 and not unit:
        return 0.0
    if math.isnan(number) or unit not in _TIMES:
        raise ValueError(f"{text!r} is no time: write 50us, 2ms or 0.5s")
    # Division by a whole number rounds only once, so that 50us is 5e-05.
    return number / round(1 / _TIMES[unit])


def _split(text: str) -> tuple[float, str]:
    """The number, or NaN where there is none or no finite one, and its unit."""
    found = _NUMBER.fullmatch(text)
    number = float(found[1]) if found else math.nan
    return number if number < math.inf else math.nan, found[2] if found else text
