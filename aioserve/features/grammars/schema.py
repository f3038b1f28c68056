"""A JSON schema as the grammar library reads it right: exact numbers, keys once, closed objects.

The library computes with floats, and rounds whole numbers to 64 bits without a word; it writes what
a pattern of keys allows again and again; and a small model fills an object that is open with keys
of its own. So each schema is rewritten before native code sees it. What the result allows, the
given schema allows as well; what cannot be said exactly is refused. Knows JSON schemas; knows
nothing about tokens, requests, or which field of a request holds the schema.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any

from aioserve.features.grammars.pattern import check_repetitions, names_of

MAX_DEPTH = 100
#: The largest whole number that both a float and a signed integer of 64 bits hold.
LARGEST = 2**63 - 1024
_EXACT = 2**53  # up to here, floats hold every whole number
_UNBOUNDED_FROM = 10**18  # where the library fails if the other bound is missing
MAX_COUNT = 2**31 - 1  # of characters, items or properties; no reply comes near
MAX_CHOICES = 512  # of names, for an object that limits how many of a few names it has
_SMALLEST = 1e-17  # what stands for the first number beside 0
_MAX_MULTIPLE = (2**32 - 10) // 10  # the library keeps ten times the rest of a division in 32 bits
_MAX_BOUND_MULTIPLE = 10_000  # beside bounds it makes states of each rest

_IN_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # lists of schemas of the very same value
_SINGLE = (
    *("additionalProperties", "propertyNames", "contains", "unevaluatedProperties"),
    *("unevaluatedItems", "additionalItems"),
)
_CONDITIONS = ("not", "if", "then", "else")  # schemas of the same value as well
_COUNTS = ("Length", "Items", "Properties")
_ELSEWHERE = {"$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "$recursiveAnchor"}
#: What tells of keys that have no name.
_OPENING = {
    *("patternProperties", "propertyNames", "unevaluatedProperties", "dependentSchemas"),
    "dependencies",
}
#: Keywords that say something about the keys of an object, other than by schemas in place.
_OF_OBJECTS = {
    *("properties", "additionalProperties", "required", "minProperties", "maxProperties"),
    *("const", "enum", "dependentRequired", *_OPENING, *_CONDITIONS),
}

#: Keywords beside which an object cannot be said as one of several.
_IN_PLACE_KEYS = {*_IN_PLACE, *_CONDITIONS, "$ref", "const", "enum", "dependentSchemas"}

Schema = dict[str, Any]


def for_grammar(schema: Mapping[str, Any], *, closes_objects: bool) -> Schema:
    """`schema` for the grammar library. With `closes_objects`, an object that declares properties
    has no others, unless the schema says `additionalProperties`.

    Raises `ValueError` that begins with the place for what cannot be kept to: numbers beyond 64
    bits or between floats, counts beyond `MAX_COUNT`, repetitions beyond
    `MAX_REPETITION`, and nesting deeper than `MAX_DEPTH`.
    """
    numbered = _numbered(dict(schema), "", 0)
    _check_multiples(numbered)
    keyed = _keyed(numbered)
    return _Closing(keyed).closed(keyed) if closes_objects else keyed


def key_options(schema: Mapping[str, Any]) -> dict[str, str]:
    """Options of the grammar library by which no key that is declared comes again in other letters:
    `"\\u0061"` is `"a"`, and the library would take it for one of the other keys. Empty where all
    keys are declared, and where a constant has a character that is written in no other way.
    """
    if re.search(r"\\u00[01]", json.dumps(schema)):
        return {}
    for _, part in _schemas(schema):
        names = part.keys() & {"properties", "patternProperties", "required"}
        if any(part[name] for name in names) and part.get("additionalProperties") is not False:
            return {"json_allowed_escapes": 'nrbtf"\\'}
    return {}


def place_of(reason: str, schema: Any) -> str:
    """Return where in `schema` the grammar library found what it refuses for this `reason`, such as
    `properties.age.not`; empty if it is not known.
    """
    unknown = re.search(r"Unimplemented keys: (\[[^\]]*\])", reason)
    if unknown is not None:
        names = json.loads(unknown[1])
        return next((f"{at}{n}" for at, s in _schemas(schema) for n in names if n in s), "")
    if "Unknown format: " in reason:
        name = reason.partition("Unknown format: ")[2].split("\n")[0]
        return next((f"{at}format" for at, s in _schemas(schema) if s.get("format") == name), "")
    keyword = re.search(r"(?:Expected|Value) .{0,60}?for '(\w+)'", reason)
    if keyword is not None:
        return next((f"{at}{keyword[1]}" for at, s in _schemas(schema) if keyword[1] in s), "")
    if "regex" not in reason:
        return ""
    said = re.search(r"'(.{1,60})' at character (\d{1,6})$", reason)
    for at, found in _schemas(schema):
        keys = found.get("patternProperties")
        patterns = {f"{at}patternProperties.{key}": key for key in _parts(keys and [*keys])}
        if isinstance(found.get("pattern"), str):
            patterns[f"{at}pattern"] = found["pattern"]
        for place, pattern in patterns.items():
            if said is None:
                is_there = bool(pattern) and pattern in reason
            else:
                is_there = pattern.startswith(said[1], int(said[2]) - 1)
            if is_there:
                return place
    return ""


# Numbers.


def _numbered(schema: Any, path: str, depth: int) -> Any:
    """`schema` with every number one that a float and 64 bits hold. Raises `ValueError`."""
    if not isinstance(schema, dict):
        return schema
    if depth > MAX_DEPTH:
        raise ValueError(f"{path[:80]}... is nested deeper than {MAX_DEPTH}")
    made = {key: value for key, value in schema.items() if not _says_nothing(key, value)}
    _bound(made, path)
    _count(made, path)
    for name in ("const", "enum"):
        if name in made:
            _check_values(made[name], f"{path}{name}", depth)
    if isinstance(pattern := made.get("pattern"), str):
        _at(f"{path}pattern", check_repetitions, pattern)
    if isinstance(patterns := made.get("patternProperties"), dict):
        for key in patterns:
            _at(f"{path}patternProperties.{key[:60]}", check_repetitions, key)
    return _mapped(made, path, lambda part, at: _numbered(part, f"{at}.", depth + 1))


def _says_nothing(key: str, value: Any) -> bool:
    return (key == "uniqueItems" and value is False) or (
        key in ("unevaluatedProperties", "unevaluatedItems", "propertyNames") and value is True
    )


def _at(path: str, check: Callable[[str], None], given: str) -> None:
    try:
        check(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _bound(schema: Schema, path: str) -> None:
    """Move the bounds of numbers inwards to the next that the library reads right."""
    given: list[Any] = [schema.get("minimum"), schema.get("maximum")]
    least = _inner_bound(schema, path, "minimum", "exclusiveMinimum", 1)
    most = _inner_bound(schema, path, "maximum", "exclusiveMaximum", -1)
    if least is not None and most is not None and least > most:
        if all(map(_is_number, given)) and given[0] <= given[1]:
            raise ValueError(
                f"{path}minimum and maximum, {_shown(given[0])} and {_shown(given[1])}, have no "
                "number between them that a float holds"
            )
    if least is not None and most is None and least >= _UNBOUNDED_FROM:
        schema["maximum"] = LARGEST
    if most is not None and least is None and most <= -_UNBOUNDED_FROM:
        schema["minimum"] = -LARGEST
    multiple: Any = schema.get("multipleOf")
    if _is_number(multiple):
        is_bound = least is not None or most is not None
        limit = _MAX_BOUND_MULTIPLE if is_bound else _MAX_MULTIPLE
        if not (multiple > 0 and math.isfinite(multiple)):
            raise ValueError(f"{path}multipleOf must be above 0, got {_shown(multiple)}")
        if _digits(multiple) > limit:
            raise ValueError(
                f"{path}multipleOf is {_shown(multiple)}: its digits must be at most {limit:,}"
                + (" beside bounds" if is_bound else "")
            )


def _inner_bound(
    schema: Schema, path: str, name: str, exclusive: str, inwards: int
) -> int | float | None:
    """Return one side; `inwards` is the direction of what it allows, as a sign. None: without
    bound.
    """
    bound: Any = schema.get(name)
    open_bound: Any = schema.get(exclusive)
    if open_bound is True:  # as draft 4 has it
        bound, open_bound = None, bound
        del schema[exclusive]
        if open_bound is not None:
            schema[exclusive] = schema.pop(name)
    for given, of in ((bound, name), (open_bound, exclusive)):
        if not _is_number(given):
            continue
        if isinstance(given, float) and not math.isfinite(given):
            raise ValueError(f"{path}{of} must be a number of 64 bits, got {_shown(given)}")
        if given * inwards > LARGEST:
            raise ValueError(
                f"{path}{of} is {_shown(given)}: no number between -{LARGEST} and {LARGEST}, "
                "the range of numbers in schemas, satisfies it"
            )
    values: list[int | float] = []
    if _is_number(bound):
        if (exact := _exact(bound, inwards)) != bound:
            schema[name] = exact
        values.append(exact)
    if _is_number(open_bound):
        exact = _exact(open_bound, inwards)
        # Beyond, one more cannot be told from it; and a whole number the library lets by if the
        # other bound begins with it as well.
        if abs(exact) >= _EXACT or exact != open_bound or schema.get("type") != "integer":
            if exact == open_bound:
                exact = _beside(exact, inwards)
            del schema[exclusive]
            schema[name] = max([*values, exact]) if inwards > 0 else min([*values, exact])
        values.append(exact)
    if not values:
        return None
    return max(values) if inwards > 0 else min(values)


def _exact(bound: int | float, inwards: int) -> int | float:
    """Return the first number from `bound` on that the library reads as it is written, and that 64
    bits hold.
    """
    if abs(bound) > LARGEST:
        return -inwards * LARGEST
    near = float(bound)
    if near < bound if inwards > 0 else near > bound:
        near = math.nextafter(near, math.inf * inwards)
    if near.is_integer():
        return int(near)  # which is read digit by digit
    return near if _is_read_right(near) else _shorter(near, inwards)


def _beside(bound: int | float, inwards: int) -> int | float:
    """Return the next number that the library reads as it is written."""
    if abs(bound) < _SMALLEST:
        return inwards * _SMALLEST
    return _exact(math.nextafter(float(bound), math.inf * inwards), inwards)


def _is_read_right(number: float) -> bool:
    """Return whether the library, which computes a number from its digits, comes to that number."""
    written = Decimal(repr(number)).normalize().as_tuple()
    digits = int("".join(map(str, written.digits)))
    return digits < _EXACT and abs(int(written.exponent)) <= 22


def _shorter(number: float, inwards: int) -> float:
    """Return the first number from `number` on that has few digits."""
    exact = Decimal(number)
    step = Decimal(1).scaleb(max(exact.adjusted() - 14, -22))
    rounded = exact.quantize(step, rounding=ROUND_CEILING if inwards > 0 else ROUND_FLOOR)
    return float(rounded)


def _digits(number: int | float) -> int:
    """Return what is written of a number without its point and sign, as a number."""
    written = Decimal(repr(number)).normalize().as_tuple()
    digits = int("".join(map(str, written.digits)))
    exponent = int(written.exponent)
    return digits * 10**exponent if 0 < exponent < 100 else digits


def _count(schema: Schema, path: str) -> None:
    """Bounds of lengths and counts: whole, and no larger than the library counts."""
    for kind in _COUNTS:
        for side in ("min", "max"):
            name = f"{side}{kind}"
            count = schema.get(name)
            if isinstance(count, float) and count.is_integer():
                schema[name] = count = int(count)
            if type(count) is not int or count <= MAX_COUNT:
                continue
            if side == "min":
                raise ValueError(f"{path}{name} must be at most {MAX_COUNT:,}, got {_shown(count)}")
            del schema[name]


def _check_values(value: Any, path: str, depth: int) -> None:
    """Raises `ValueError` for a number within a constant that the library would round."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{path[:80]}... is nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        for i, part in enumerate(value):
            _check_values(part, f"{path}[{i}]", depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            _check_values(part, f"{path}.{key}", depth + 1)
    elif _is_number(value):
        is_finite = isinstance(value, int) or math.isfinite(value)
        if (
            not is_finite
            or abs(value) > LARGEST
            or float(value) != value
            or (isinstance(value, float) and not _is_read_right(value))
        ):
            raise ValueError(
                f"{path} is {_shown(value)}: a constant must be a number that a float holds "
                f"exactly, of 15 digits or whole, from -{LARGEST} to {LARGEST}"
            )


def _check_multiples(schema: Schema) -> None:
    """Raises `ValueError` if several `multipleOf` that may meet in one value are more than 32 bits
    together: the library's product of them is silently another number.
    """
    found = [(at, s["multipleOf"]) for at, s in _schemas(schema) if _is_number(s.get("multipleOf"))]
    if not any(name in s for _, s in _schemas(schema) for name in (*_IN_PLACE, "$ref")):
        return
    if not found:
        return
    digits = [Decimal(repr(value)).normalize().as_tuple() for _, value in found]
    places = max(max(-int(each.exponent), 0) for each in digits)
    scaled = [int(Fraction(Decimal(repr(value))) * 10**places) for _, value in found]
    together = math.lcm(*scaled) if len(set(scaled)) > 1 else scaled[0]
    is_alone = len(found) == 1
    if not is_alone and together * max(scaled) >= 2**32:
        first, last = found[0], found[-1]
        raise ValueError(
            f"{last[0]}multipleOf is {_shown(last[1])} beside {_shown(first[1])} at {first[0]}"
            "multipleOf: where several may hold for one number, their product must be below 2^32"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(number: int | float) -> str:
    if isinstance(number, int) and number.bit_length() > 128:
        return f"a number of {number.bit_length()} bits"
    return str(number)


# Keys.


def _keyed(schema: Any) -> Any:
    """`schema` in which names that are known are properties, so that each is written once, and
    what is said about names is said as the library knows it.
    """
    if not isinstance(schema, dict):
        return schema
    made: Schema = _mapped(schema, "", lambda part, _: _keyed(part))
    if made.keys() & {"propertyNames", "unevaluatedProperties"}:
        _say_names(made)
    if isinstance(patterns := made.get("patternProperties"), dict):
        _name_keys(made, patterns)
    return made


def _say_names(schema: Schema) -> None:
    """Say `propertyNames` and `unevaluatedProperties` otherwise, where that can be."""
    if not schema.keys() & {*_IN_PLACE, "$ref", *_CONDITIONS, "dependentSchemas"}:
        rest = schema.pop("unevaluatedProperties", None)
        if rest is not None:
            schema.setdefault("additionalProperties", rest)
    names, patterns = schema.get("propertyNames"), schema.get("patternProperties")
    if not isinstance(names, dict) or patterns:
        return
    said = {key: value for key, value in names.items() if key not in ("title", "description")}
    if said.get("type") == "string":
        del said["type"]
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    others = schema.get("additionalProperties", True)
    listed = said.get("enum", [said["const"]] if "const" in said else None)
    if not said:
        del schema["propertyNames"]
    elif len(said) == 1 and isinstance(listed, list) and all(isinstance(n, str) for n in listed):
        del schema["propertyNames"]
        first = [name for name in properties if name in listed]
        schema["properties"] = {
            name: properties.get(name, others) for name in dict.fromkeys([*first, *listed])
        }
        schema["additionalProperties"] = False
    elif not properties and not said.keys() - {"pattern", "minLength", "maxLength"}:
        pattern = said.get("pattern")
        if pattern is None:
            least, most = said.get("minLength", 0), said.get("maxLength", "")
            pattern = f"^(?s:.{{{least},{most}}})$"
        elif len(said) > 1:
            return
        del schema["propertyNames"]
        schema["patternProperties"] = {pattern: others}
        schema["additionalProperties"] = False


def _name_keys(schema: Schema, patterns: Mapping[str, Any]) -> None:
    """Make properties of patterns that match a few names alone."""
    named = {pattern: names for pattern in patterns if (names := names_of(pattern)) is not None}
    properties = schema.get("properties", {})
    if not named or not isinstance(properties, dict):
        return
    left = {key: value for key, value in patterns.items() if key not in named}
    made = dict(properties)
    for pattern, names in named.items():
        part = patterns[pattern]
        for name in names:
            made[name] = {"allOf": [made[name], part]} if name in made else part
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    is_closed = not left and schema.get("additionalProperties") is False
    if most is not None and is_closed and most >= len(made):
        most = None
    # The library counts properties that may be left out up to one, and none but those.
    if (least or most is not None) and not (is_closed and least <= 1 and most in (None, 1)):
        if is_closed and schema.get("type") == "object" and not schema.keys() & _IN_PLACE_KEYS:
            _count_keys(schema, made, least, most)
        return
    if most is None:
        schema.pop("maxProperties", None)
    schema["properties"] = made
    del schema["patternProperties"]
    if left:
        schema["patternProperties"] = left


def _count_keys(schema: Schema, properties: Schema, least: Any, most: Any) -> None:
    """Replace an object of a few names that has at least `least` and at most `most` of them by a
    choice of objects: the library counts no name that may be left out, and would count a name as
    often as it is written.

    Raises `ValueError` for more than `MAX_CHOICES` choices of names.
    """
    if not all(count is None or (type(count) is int and count >= 0) for count in (least, most)):
        return  # the library says what is wrong
    names, required = list(properties), {*schema.get("required", ())}
    choices: list[tuple[Sequence[str], Sequence[str]]] = []  # names that are there, and may be
    sizes = [least] if most is None else range(least, min(most, len(names)) + 1)
    for size in sizes:
        if math.comb(len(names), size) + len(choices) > MAX_CHOICES:
            raise ValueError(
                f"minProperties and maxProperties leave more than {MAX_CHOICES} choices among the "
                f"{len(names)} names of patternProperties, which cannot be kept to"
            )
        for places in itertools.combinations(range(len(names)), size):
            first = [names[place] for place in places]
            # Those that are there first; without an upper bound, others may follow the last one.
            rest = names[places[-1] + 1 :] if most is None else []
            if required <= {*first, *rest}:
                needed = [*first, *(name for name in rest if name in required)]
                choices.append((needed, [*first, *rest]))
    if not choices:
        raise ValueError(
            f"minProperties, maxProperties and required leave no choice among the {len(names)} "
            "names of patternProperties"
        )
    for key in ("type", "properties", "patternProperties", "additionalProperties", "required"):
        schema.pop(key, None)
    schema.pop("minProperties", None)
    schema.pop("maxProperties", None)
    schema["anyOf"] = [
        {
            "type": "object",
            "properties": {name: properties[name] for name in allowed},
            "required": needed,
            "additionalProperties": False,
        }
        for needed, allowed in choices
    ]


# Closed objects.


class _Closing:
    """The objects of one document that may be closed, and those that may be only together with
    others.

    Schemas of one and the same value, as of `allOf`, each close what the others declare. There the
    whole is closed, for all names that any of them declares.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._composed: set[int] = set()  # ids of schemas that hold beside others
        self._seen: set[tuple[int, bool]] = set()
        self._is_known = not any(
            schema.keys() & _ELSEWHERE or (at and "$id" in schema) for at, schema in _schemas(root)
        )
        self._visit(root, True, 0)

    def closed(self, schema: Schema) -> Schema:
        """Return all of the document with its objects closed; itself, if a reference leads
        elsewhere.
        """
        return self._close(schema) if self._is_known else schema

    def _visit(self, schema: Any, is_alone: bool, depth: int) -> None:
        """Find what holds beside others, from a schema that does so itself or not."""
        if not isinstance(schema, dict) or (id(schema), is_alone) in self._seen:
            return
        self._seen.add((id(schema), is_alone))
        if depth > 10 * MAX_DEPTH:
            self._is_known = False
            return
        if not is_alone:
            self._composed.add(id(schema))
        within = is_alone and _passes_on(schema)
        for name in (*_IN_PLACE, *_CONDITIONS):
            for part in _parts(schema.get(name)):
                self._visit(part, within, depth + 1)
        for part in _parts(schema.get("dependentSchemas")):
            self._visit(part, False, depth + 1)
        if "$ref" in schema:
            target = self._target(schema["$ref"])
            self._is_known &= target is not None
            self._visit(target, within, depth + 1)
        for name, part in _others(schema):
            if name not in ("$defs", "definitions"):  # which hold where they are referred to
                self._visit(part, True, depth + 1)

    def _close(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        made: Schema = _mapped(schema, "", lambda part, _: self._close(part))
        if id(schema) in self._composed:
            return made
        if schema.keys() & {*_IN_PLACE, *_CONDITIONS, "$ref", "dependentSchemas"}:
            if not _passes_on(schema):
                self._close_whole(schema, made)
        elif _may_close(schema):
            properties = {**schema.get("properties", {}), **_undeclared(schema)}
            if properties.keys() != schema.get("properties", {}).keys():
                made["properties"] = {**dict.fromkeys(properties, True), **made["properties"]}
            made["additionalProperties"] = False
        return made

    def _close_whole(self, schema: Schema, made: Schema) -> None:
        """Close what several schemas say about one object."""
        names = self._names(schema, set())
        if not names or not any(names.values()):
            return
        counts = [s.get("minProperties", 0) for _, s in _schemas(schema)]
        if any(type(count) is int and count > len(names) for count in counts):
            return
        closure = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
        given = made.get("allOf")
        if isinstance(given, list):
            made["allOf"] = [*given, closure]
        else:
            made["allOf"] = [closure]

    def _names(self, schema: Any, seen: set[int]) -> dict[str, bool] | None:
        """Return names that schemas of one value declare, each with whether as a property; None if
        they say what other names there may be.
        """
        if schema is True:
            return None
        if not isinstance(schema, dict) or id(schema) in seen:
            return {}
        seen.add(id(schema))
        if schema.get("additionalProperties", False) is not False or schema.keys() & _OPENING:
            return None
        if any(isinstance(value, dict) for value in _values_of(schema)):
            return None
        names = dict.fromkeys(_undeclared(schema), False)
        properties = schema.get("properties")
        names |= dict.fromkeys(properties if isinstance(properties, dict) else (), True)
        parts = [part for name in (*_IN_PLACE, *_CONDITIONS) for part in _parts(schema.get(name))]
        if "$ref" in schema:
            parts.append(self._target(schema["$ref"]))
        for part in parts:
            more = self._names(part, seen)
            if more is None:
                return None
            for name, is_property in more.items():
                names[name] = names.get(name, False) or is_property
        return names

    def _target(self, ref: Any) -> Schema | None:
        """Return the schema that a reference within the document names; None if there is
        none here.
        """
        found = _place_in(self._root, ref) if isinstance(ref, str) else None
        return found if isinstance(found, dict) else None


def _passes_on(schema: Schema) -> bool:
    """Return whether one keyword names the schemas of this value, and nothing else is said of its
    keys.
    """
    given = [name for name in (*_IN_PLACE, "$ref") if name in schema]
    if len(given) != 1 or schema.keys() & _OF_OBJECTS:
        return False
    parts = schema[given[0]]
    if given[0] == "allOf":
        return isinstance(parts, list) and len(parts) == 1
    return given[0] != "oneOf" or _are_told_apart(parts)


def _are_told_apart(options: Any) -> bool:
    """Return whether of schemas, of which a value is to fit one alone, no two fit the same value
    however open their objects are: by a constant under a name that is required, or by their types.
    Others are told apart by no more than keys that closed objects lack, and stay as they are.
    """
    if not isinstance(options, list):
        return False
    for i, one in enumerate(options):
        for other in options[:i]:
            if not isinstance(one, dict) or not isinstance(other, dict):
                return False
            if "$ref" in one or "$ref" in other:
                continue  # the library looks at constants alone, and refuses the others
            if {one.get("type"), other.get("type")} == {"object"} and not _has_constants(
                one, other
            ):
                return False
    return True


def _has_constants(one: Schema, other: Schema) -> bool:
    first, second = one.get("properties", {}), other.get("properties", {})
    for name in {*one.get("required", ()), *other.get("required", ())}:
        mine, theirs = _values_of(first.get(name)), _values_of(second.get(name))
        if mine and theirs and not any(value in theirs for value in mine):
            return True
    return False


def _values_of(schema: Any) -> list[Any]:
    """Return the constants to which a schema is bound; empty if it is not."""
    if not isinstance(schema, dict):
        return []
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def _may_close(schema: Schema) -> bool:
    """Return whether a schema declares keys, and leaves open whether there are others."""
    if not schema.keys() & {"properties", "patternProperties"}:
        return False
    if schema.keys() & {"additionalProperties", "propertyNames", "unevaluatedProperties"}:
        return False
    properties, kinds = schema.get("properties", {}), schema.get("type", "object")
    least, is_patterned = schema.get("minProperties", 0), bool(schema.get("patternProperties"))
    if not isinstance(properties, dict) or not isinstance(least, int):
        return False
    if _undeclared(schema) and is_patterned:
        return False
    num_names = len(properties) + len(_undeclared(schema))
    return (least <= num_names or is_patterned) and "object" in (
        [kinds] if isinstance(kinds, str) else kinds
    )


def _undeclared(schema: Schema) -> dict[str, bool]:
    """Return names that are required and no property."""
    required, properties = schema.get("required"), schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    names = required if isinstance(required, list) else []
    return {name: True for name in names if isinstance(name, str) and name not in properties}


# What all of the above goes by.


def _parts(value: Any) -> list[Any]:
    """Return the schemas under a keyword, whichever way it holds them."""
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return [value]
    return []


def _others(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Schemas within one that are of another value, or of none, with their keyword."""
    for name in _IN_MAPPINGS:
        if name != "dependentSchemas" and isinstance(parts := schema.get(name), dict):
            yield from ((name, part) for part in parts.values())
    for name in ("prefixItems", "items", *_SINGLE):
        yield from ((name, part) for part in _parts(schema.get(name)))


def _mapped(schema: Schema, path: str, change: Callable[[Any, str], Any]) -> Schema:
    """Return a copy of `schema` with `change` made to each schema right within it, by its path."""
    made = dict(schema)
    for name in _IN_MAPPINGS:
        if isinstance(parts := schema.get(name), dict):
            made[name] = {key: change(part, f"{path}{name}.{key}") for key, part in parts.items()}
    for name in (*_IN_PLACE, "prefixItems", "items"):
        if isinstance(parts := schema.get(name), list):
            made[name] = [change(part, f"{path}{name}[{i}]") for i, part in enumerate(parts)]
    for name in ("items", *_SINGLE, *_CONDITIONS):
        if isinstance(part := schema.get(name), dict):
            made[name] = change(part, f"{path}{name}")
    return made


def _schemas(root: Any) -> Iterator[tuple[str, Schema]]:
    """Yield each schema of a document, with what stands before the names of its keywords in
    a path.
    """
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        at, schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield at, schema
        waiting += reversed(_within(schema, at))


def _within(schema: Schema, at: str) -> list[tuple[str, Any]]:
    """Return each schema right within one, as `_schemas` yields it."""
    found: list[tuple[str, Any]] = []
    _mapped(schema, at, lambda part, path: found.append((f"{path}.", part)))
    return found


# Whether a JSON schema allows any finite value, and where it does not. A schema whose values all
# hold a value of the same schema allows none that ends: a reply bound to it would go on until it is
# cut. Knows `$ref` within the document, and the keywords that need a value.


#: Rounds over all references: each settles what needs those before. Schemas need one or two.
MAX_ROUNDS = 8


def check_finite(schema: Mapping[str, Any]) -> None:
    """Raises `ValueError` that names the `$ref` which every value of `schema` follows without end.

    What more than `MAX_ROUNDS` or `MAX_DEPTH` would show passes.
    """
    if (ref := _Search(schema).blocked()) is not None:
        raise ValueError(f"no value of the schema is finite: {ref!r} always holds another of it")


class _Search:
    """The references of one document that have finite values, as far as is known."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._finite: set[str] = set()  # references that have a finite value
        self._open: set[str] = set()  # those that are looked at, in this round or right now

    def blocked(self) -> str | None:
        for _ in range(MAX_ROUNDS):
            known = len(self._finite)
            self._open.clear()
            found = self._blocked(self._root, 0)
            if found is None or len(self._finite) == known:
                return found
        return None

    def _blocked(self, schema: Any, depth: int) -> str | None:
        """Return the reference for which no finite value is known; None if there is one."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        if "const" in schema or "enum" in schema:
            return None
        ref = schema.get("$ref")
        if isinstance(ref, str) and (found := self._follow(ref, depth)) is not None:
            return found
        for name in ("anyOf", "oneOf"):
            options = schema.get(name)
            if isinstance(options, list) and options:
                blocks = [self._blocked(option, depth + 1) for option in options]
                if all(blocks):
                    return blocks[0]
        return next(filter(None, (self._blocked(s, depth + 1) for s in _needed(schema))), None)

    def _follow(self, ref: str, depth: int) -> str | None:
        if ref in self._finite:
            return None
        if ref in self._open:
            return ref
        self._open.add(ref)
        found = self._blocked(_place_in(self._root, ref), depth + 1)
        if found is None:
            self._finite.add(ref)
        return found


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of which every value of `schema` holds a value, or which it fits as
    well.
    """
    yield from _listed(schema, "allOf")
    if schema.get("type") == "object":
        properties, names = schema.get("properties"), _listed(schema, "required")
        properties = properties if isinstance(properties, dict) else {}
        yield from (properties[n] for n in names if isinstance(n, str) and n in properties)
        if not properties and (names or _least(schema, "minProperties")):
            yield schema.get("additionalProperties")
    elif schema.get("type") == "array":
        first, least = _listed(schema, "prefixItems"), _least(schema, "minItems")
        yield from first[:least]
        if least > len(first):
            yield schema.get("items")


def _least(schema: Mapping[str, Any], name: str) -> int:
    found = schema.get(name)
    return max(found, 0) if isinstance(found, int) else 0


def _listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _place_in(root: Any, ref: str) -> Any:
    """Return what a reference within the document names; None for any other, which may hold
    values.
    """
    if ref != "#" and not ref.startswith("#/"):
        return None
    for step in ref.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = root[int(step)] if step.isdigit() and int(step) < len(root) else None
        else:
            root = root.get(step) if isinstance(root, dict) else None
    return root
