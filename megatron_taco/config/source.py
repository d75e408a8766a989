"""Where every value of a configuration came from."""

from dataclasses import dataclass, field

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Origins:
    """Places of keys: the file's lines, the overrides, and the preset.

    Attributes:
        file: Path of the file as the user wrote it.
        lines: One-based line of each dotted key of the file.
        overrides: Text `a.b=c` of the last override of each dotted key.
        preset: Name of the model preset, if any.
        preset_keys: Dotted keys whose value the preset gave.
    """

    file: str
    lines: dict[str, int] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    preset: str | None = None
    preset_keys: frozenset[str] = frozenset()

    def where(self, dotted: str) -> str:
        """Return `file:line`, `command line`, `preset NAME` or `default` for one key.

        An element of a list (`data.path.2`) has the place of its list.
        """
        key = dotted
        while key.rpartition(".")[2].isdigit():
            key = key.rpartition(".")[0]
        if key in self.overrides:
            return COMMAND_LINE
        if key in self.lines:
            return f"{self.file}:{self.lines[key]}"
        if key in self.preset_keys:
            return f"preset {self.preset}"
        return DEFAULT

    def place(self, dotted: str) -> tuple[str, str]:
        """Return (location, key) for a message about `dotted`, also if nobody wrote it.

        A key that nobody wrote has the line of the nearest section above it, or the file's first.
        A section that only an override made has that override's place.
        """
        if dotted not in self.lines:
            for key, shown in self.overrides.items():
                if key.startswith(dotted + "."):
                    return COMMAND_LINE, shown
        key = dotted
        while key:
            if key in self.overrides:
                shown = self.overrides[key]
                return COMMAND_LINE, shown if key == dotted else f"{shown}: {dotted}"
            if key in self.lines:
                return f"{self.file}:{self.lines[key]}", dotted
            key = key.rpartition(".")[0]
        return f"{self.file}:1", dotted
