"""The form that a client wants its answer in: OpenAI's response_format and vLLM's structured_outputs, to a grammar."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from adapter.structured import GrammarRefused, choice_grammar, free_grammar, json_grammar, regex_grammar

KINDS = ("json", "json_object", "regex", "choice", "grammar")
ANY_OBJECT = {"type": "object"}


class Strict(BaseModel):
    """No guessing: "0.5" is no number, and an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class JsonSchema(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # a schema is followed to the letter either way


class ResponseFormat(Strict):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def with_its_schema(self) -> Self:
        """A schema where the type says so, and nowhere else."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with the type "json_schema", and only with it')
        return self

    @property
    def binds(self) -> bool:
        """Whether it asks for anything but text."""
        return self.type != "text"

    def grammar(self) -> str:
        """What the answer must follow, where this binds."""
        return json_grammar(ANY_OBJECT if self.json_schema is None else self.json_schema.schema_)


class StructuredOutputs(Strict):
    """vLLM's structured_outputs, as far as llguidance serves it."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")  # a schema, or one written as text
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar_: str | None = Field(None, alias="grammar")
    disable_any_whitespace: bool = False

    @model_validator(mode="after")
    def exactly_one(self) -> Self:
        """As at vLLM."""
        given = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar_]
        if sum(value is not None for value in given) != 1:
            raise ValueError(f"give exactly one of {', '.join(KINDS)}")
        return self

    def grammar(self) -> str:
        """What the answer must follow."""
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.grammar_ is not None:
            return free_grammar(self.grammar_)
        schema = ANY_OBJECT if self.json_ is None else _schema(self.json_)
        return json_grammar(schema, self.disable_any_whitespace)


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarRefused("the schema is not a JSON object")
    return schema
