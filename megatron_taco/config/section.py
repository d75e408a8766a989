"""What all sections of the configuration have in common."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, keyword-only section in which unknown keys and changed types are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for keys of this section that exclude or need each other."""
        yield from ()

    def plain(self) -> dict[str, Any]:
        """Return the section as YAML would hold it, without keys that are not set."""
        result: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if hasattr(value, "plain"):
                value = value.plain()
            elif isinstance(value, tuple):
                value = list(value)
            if value is not None:
                result[name] = value
        return result
