"""A minimal valid value for a JSON schema: required properties, shortest arrays, first alternatives.

Reads the subset that tools and structured outputs use; ``pattern``, ``not`` and ``if`` are ignored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from proxy.simulator.shape import Body, integer, mapping, sequence, text

_FORMATS = {
    "date": "2030-01-02",
    "date-time": "2030-01-02T03:04:05Z",
    "time": "03:04:05Z",
    "duration": "P1D",
    "email": "reader@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_IMPLIED = {
    "properties": "object",
    "items": "array",
    "minLength": "string",
    "pattern": "string",
    "minimum": "number",
}


def example(schema: object, words: Iterator[str]) -> object:
    """Value that satisfies the schema; strings without further rules are taken from ``words``."""
    try:
        return _Example(root=mapping(schema), words=words).of(schema, ())
    except _EndlessError:
        return None


class _EndlessError(Exception):
    """A schema that requires itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    root: Body
    words: Iterator[str]

    def of(self, schema: object, open_refs: tuple[str, ...]) -> object:
        fields = mapping(schema)
        if "$ref" in fields:
            reference = text(fields["$ref"])
            if reference in open_refs:
                raise _EndlessError(reference)
            return self.of(self._resolve(reference), (*open_refs, reference))
        if "const" in fields:
            return fields["const"]
        if sequence(fields.get("enum")):
            return sequence(fields["enum"])[0]
        for combinator in ("anyOf", "oneOf"):
            if sequence(fields.get(combinator)):
                return self._first(fields, combinator, open_refs)
        if sequence(fields.get("allOf")):
            return self.of(_merged(fields), open_refs)
        return self._typed(fields, open_refs)

    def _resolve(self, reference: str) -> object:
        target: object = self.root
        for step in reference.removeprefix("#").split("/")[1:]:
            target = mapping(target).get(step.replace("~1", "/").replace("~0", "~"))
        return target

    def _first(self, fields: Body, combinator: str, open_refs: tuple[str, ...]) -> object:
        rest = {key: value for key, value in fields.items() if key != combinator}
        for branch in sequence(fields[combinator]):
            try:
                return self.of({**rest, **mapping(branch)}, open_refs)
            except _EndlessError:
                continue
        raise _EndlessError(combinator)

    def _typed(self, fields: Body, open_refs: tuple[str, ...]) -> object:
        match _type(fields):
            case "object":
                return self._object(fields, open_refs)
            case "array":
                return self._array(fields, open_refs)
            case "string":
                return self._string(fields)
            case "integer":
                return int(_number(fields, 1))
            case "number":
                return _number(fields, 0)
            case "boolean":
                return True
            case _:
                return None

    def _object(self, fields: Body, open_refs: tuple[str, ...]) -> dict[str, object]:
        properties = mapping(fields.get("properties"))
        required = [text(name) for name in sequence(fields.get("required"))]
        ordered = [name for name in properties if name in required]
        ordered += [name for name in required if name not in properties]
        return {name: self.of(properties.get(name, {"type": "string"}), open_refs) for name in ordered}

    def _array(self, fields: Body, open_refs: tuple[str, ...]) -> list[object]:
        prefix = sequence(fields.get("prefixItems"))
        length = max(integer(fields.get("minItems")) or 0, 0)
        members = [*prefix[:length], *[fields.get("items", {})] * max(0, length - len(prefix))]
        return [self.of(member, open_refs) for member in members]

    def _string(self, fields: Body) -> str:
        known = _FORMATS.get(text(fields.get("format")))
        if known is not None:
            return known
        value = next(self.words)
        shortest = integer(fields.get("minLength")) or 0
        while len(value) < shortest:
            value = f"{value} {next(self.words)}"
        return value[: integer(fields.get("maxLength"))]


def _type(fields: Body) -> str:
    declared = fields.get("type")
    if isinstance(declared, str):
        return declared
    if sequence(declared):
        return text(sequence(declared)[0])
    return next((implied for key, implied in _IMPLIED.items() if key in fields), "null")


def _number(fields: Body, step: int) -> float:
    """Smallest allowed number from zero up; ``step`` is what an exclusive bound is passed by, 0 for a fraction."""
    past = step or 0.5
    low = _bound(fields, "minimum", "exclusiveMinimum", past)
    high = _bound(fields, "maximum", "exclusiveMaximum", -past)
    value: float = low if low is not None else min(0, high) if high is not None else 0
    if step and value != int(value):
        value = int(value) + (value > 0)
    multiple = fields.get("multipleOf")
    if isinstance(multiple, int | float) and multiple > 0:
        value = -(-value // multiple) * multiple
    return value


def _bound(fields: Body, inclusive: str, exclusive: str, past: float) -> float | None:
    if isinstance(bound := fields.get(inclusive), int | float):
        return bound
    if isinstance(bound := fields.get(exclusive), int | float):
        return bound + past
    return None


def _merged(fields: Body) -> Body:
    """Fold ``allOf`` into one schema; properties and required names add up, else the later rule wins."""
    merged: dict[str, object] = {key: value for key, value in fields.items() if key != "allOf"}
    for branch in sequence(fields.get("allOf")):
        for key, value in mapping(branch).items():
            before = merged.get(key)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                merged[key] = {**before, **value}
            elif isinstance(before, list) and isinstance(value, list):
                merged[key] = [*before, *value]
            else:
                merged[key] = value
    return merged
