"""Random JSON schemas of bounded size, from a seed."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ["name", "id", "größe", "value", "a b", 'x"y', "kind", "left", "ok", "日本"]
_PATTERNS = [
    "^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$",
    "^(red|green|blue)$",
    "^[A-Z][a-z]{0,4}(-[0-9]{1,3})?$",
    r'^[^"\\]{1,4}$',
]
_FORMATS = ["uuid", "ipv4"]
_VALUES = ["a", "c d", "é", 1, 2.5, True, None, '"q"', "a longer value"]
_DEEPEST = 3
_DEFINITIONS = {
    "leaf": {"type": "string", "maxLength": 5},
    "pair": {
        "type": "object",
        "properties": {"l": {"$ref": "#/$defs/leaf"}, "r": {"enum": [1, 2, 3]}},
        "required": ["l", "r"],
        "additionalProperties": False,
    },
}


def random_schema(seed: int) -> Schema:
    """An object's schema: nested objects, arrays, unions, references, patterns, bounds."""
    rng = random.Random(seed)
    return _object(rng, 0) | {"$defs": _DEFINITIONS}


def _any(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [
        _string,
        _pattern,
        _integer,
        _number,
        _enum,
        _plain,
        _reference,
    ]
    if depth < _DEEPEST:
        kinds += [_object, _object, _object, _array, _array, _union]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    array = {
        "type": "array",
        "items": _any(rng, depth + 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }
    return array | ({"prefixItems": [_plain(rng, depth)]} if rng.random() < 0.2 else {})


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}


def _pattern(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-1000, 1000)
    if rng.random() < 0.3:
        most = least + rng.randint(2, 50)
        return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": most}
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 5000)}


def _number(rng: random.Random, depth: int) -> Schema:
    least = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": least, "maximum": round(least + rng.uniform(1, 100), 2)}


def _enum(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"const": rng.choice([*_VALUES, {"k": [1, 2]}])}
    return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}


def _plain(rng: random.Random, depth: int) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])


def _reference(rng: random.Random, depth: int) -> Schema:
    return {"$ref": f"#/$defs/{rng.choice(['leaf', 'pair'])}"}
