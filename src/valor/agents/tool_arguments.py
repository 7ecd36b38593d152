"""Whether a call has the arguments that its tool's schema asks for."""

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match

from valor.agents.formats import Schema
from valor.errors import UserError, did_you_mean

_MAX_COMPLAINT = 200  # characters


class ArgumentCheck:
    """The parameters of one tool. Raises UserError when they are no JSON schema.

    Arguments without a name in the schema are wrong, unless it has `additionalProperties`.
    """

    def __init__(self, schema: Schema) -> None:
        parameters = _with_nulls(schema["function"].get("parameters") or {"type": "object", "properties": {}})
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            raise UserError(
                f"the parameters of tool {schema['function']['name']} are no JSON schema: {error.message} "
                f"(at {error.json_path})"
            ) from None
        self._validator = Draft202012Validator(parameters)
        self._names = parameters.get("properties", {}) if "additionalProperties" not in parameters else None

    def complaint(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments, None when nothing is."""
        if self._names is not None:
            for name in arguments:
                if name not in self._names:
                    return f"there is no argument {name[:60]!r}{did_you_mean(name[:60], self._names)}"
        try:
            error = best_match(self._validator.iter_errors(arguments))
        except Exception as error:  # too deeply nested, or a reference in the schema that leads nowhere
            return f"they cannot be checked ({type(error).__name__})"
        if error is None:
            return None
        place = ".".join(map(str, error.absolute_path))
        return f"{place}: {error.message}"[:_MAX_COMPLAINT] if place else error.message[:_MAX_COMPLAINT]


def _with_nulls(schema: Any) -> Any:
    """A schema that says `"nullable": true`, as transformers writes Optional, in JSON Schema's own words."""
    if isinstance(schema, list):
        return [_with_nulls(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: _with_nulls(part) for key, part in schema.items() if key != "nullable" or part is not True}
    return {"anyOf": [plain, {"type": "null"}]} if len(plain) < len(schema) else plain
