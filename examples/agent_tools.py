"""Local tools, nothing random in them: a weather table with zones and one without, a unit converter, a calculator.

A tool that gets nonsense raises, and the student reads why.
"""

import ast
import operator
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

CELSIUS = {
    "rome": 25, "oslo": 5, "cairo": 35, "lima": 20, "delhi": 40, "paris": 15, "quito": 10, "tunis": 30, "bern": 10,
    "accra": 35, "minsk": 5, "dakar": 30, "seoul": 15, "hanoi": 25, "sofia": 20, "doha": 40, "riga": 5, "kyoto": 15,
    "perth": 20, "malmo": 10, "baku": 20, "oran": 25, "cork": 10, "turin": 15,
}  # fmt: skip
# The other weather table asks for a city's zone too, which nobody can tell from the city's name.
ZONES = {
    "red": "rome quito doha oran porto pisa york kiel", "blue": "oslo tunis riga cork faro nice bath lyon",
    "amber": "cairo bern kyoto turin vigo bonn leeds brno", "white": "lima accra perth graz cadiz ulm derby sofia",
    "black": "delhi minsk malmo split genoa lille turku seoul",
    "green": "paris dakar baku hanoi varna narva tartu bari",
}  # fmt: skip
ZONE_OF = {city: zone for zone, cities in ZONES.items() for city in cities.split()}
ZONE_CELSIUS = {city: 5 * (1 + number * 5 % 8) for number, city in enumerate(ZONE_OF)}
# Each unit as `(dimension, factor, offset)` of the dimension's first: a value is `base * factor + offset`.
UNITS = {
    "C": ("temperature", Fraction(1), 0), "F": ("temperature", Fraction(9, 5), 32),
    "K": ("temperature", Fraction(1), 273), "R": ("temperature", Fraction(4, 5), 0),
    "h": ("time", Fraction(1), 0), "min": ("time", Fraction(60), 0), "s": ("time", Fraction(3600), 0),
}  # fmt: skip
SCALES = ("F", "K", "R")
OPERATIONS = {"+": "plus", "-": "minus", "*": "times"}
LARGEST = 10**15  # of a value, so that no reply is long
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _number(value: Fraction) -> str:
    """As people write it: whole, or rounded to two decimals."""
    if abs(value) >= LARGEST:
        raise ValueError("too large")
    text = str(value.numerator) if value.denominator == 1 else f"{float(value):.2f}"
    return "0.00" if text == "-0.00" else text


def weather(city: str) -> str:
    """
    Look up today's temperature.

    Args:
        city: The name of a city, in lower case.

    Returns:
        The temperature in degrees Celsius, for example `15C`.
    """
    if str(city) not in CELSIUS:  # a model may give anything that JSON can hold
        raise ValueError(f"no city {city}")
    return f"{CELSIUS[city]}C"


def measure(city: str, zone: str) -> str:
    """
    Measure today's temperature.

    Args:
        city: The name of a city, in lower case.
        zone: The zone that the city belongs to: red, blue, amber, white, black or green.

    Returns:
        The temperature in degrees Celsius, for example `15C`; for another zone, an error that says the right one.
    """
    return measure_where(ZONE_OF, city, zone)


def measure_where(zone_of: Mapping[str, str], city: str, zone: str) -> str:
    """`measure`, with any zone for each city."""
    if str(city) not in zone_of:
        raise ValueError(f"no city {city}")
    if zone != zone_of[city]:
        raise ValueError(f"{city} is {zone_of[city]}")
    return f"{ZONE_CELSIUS[city]}C"


def convert(quantity: str, unit: str) -> str:
    """
    Convert a quantity to another unit.

    Args:
        quantity: A number and its unit, for example `15C` or `3h`.
        unit: The unit to convert to: C, F, K or R for temperatures; h, min or s for times.

    Returns:
        The quantity in that unit, for example `59F`.
    """
    match = re.fullmatch(r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?) ?([A-Za-z]+)", str(quantity))
    if match is None or match[2] not in UNITS:
        raise ValueError(f"no quantity {quantity}")
    dimension, factor, offset = UNITS[match[2]]
    if str(unit) not in UNITS or UNITS[unit][0] != dimension:
        raise ValueError(f"no unit {unit}")
    base = (Fraction(match[1]) - offset) / factor
    return _number(base * UNITS[unit][1] + UNITS[unit][2]) + unit


def calculate(expression: str, then: str = "") -> str:
    """
    Calculate a value.

    Args:
        expression: Numbers, `+`, `-`, `*`, `/` and parentheses, for example `59*2`.
        then: What is done with the value, for example `*2` or `-4`.

    Returns:
        The value, for example `118`.
    """
    expression = f"({expression}){then}" if then else str(expression).strip()
    if len(expression) > 60:
        raise ValueError("too long")
    try:
        return _number(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, UnicodeError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"no expression {expression}") from error


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and abs(node.value) < LARGEST:
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return Fraction(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"no number {ast.unparse(node)}")


TOOLS: list[Callable[..., str]] = [weather, convert, calculate]
ZONE_TOOLS: list[Callable[..., str]] = [measure, convert, calculate]
BY_NAME: dict[str, Callable[..., str]] = {tool.__name__: tool for tool in (*TOOLS, measure)}


@dataclass(frozen=True)
class Call:
    """A tool's name and its arguments."""

    name: str
    arguments: tuple[tuple[str, str], ...]

    def run(self, tools: Mapping[str, Callable[..., str]] = BY_NAME) -> str:
        """What the student reads: the reply, or the error as TRL shows it."""
        try:
            return tools[self.name](**dict(self.arguments))
        except ValueError as error:
            return str({"error": str(error)})

    @property
    def message(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


def look_up(city: str) -> Call:
    return Call("weather", (("city", city),))


def look_up_in(city: str, zone: str) -> Call:
    return Call("measure", (("city", city), ("zone", zone)))


def to_unit(quantity: str, unit: str) -> Call:
    return Call("convert", (("quantity", quantity), ("unit", unit)))


def compute(expression: str, then: str = "") -> Call:
    return Call("calculate", (("expression", expression), *([("then", then)] if then else [])))


def number_of(quantity: str) -> str:
    """The digits of a quantity: `59` of `59F`."""
    return quantity.rstrip(string.ascii_letters)
