"""What the documentation refers to is there: files, and the messages it explains."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def messages() -> list[str]:
    table = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def source() -> str:
    """All code, with strings that stand on several lines joined, and their gaps marked."""
    text = "".join(path.read_text("utf-8") for path in (ROOT / "megatron_taco").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\{[^{}\n]*\}", "…", joined)


def test_every_message_explained_is_one_that_we_give() -> None:
    """Its longest part without a gap (`...`, `X`, numbers) stands in the code."""
    assert len(messages()) > 15
    given = source()
    not_ours = {"found NaN in the loss"}  # Megatron's word order, ours in the step
    for message in messages():
        parts = re.split(r"\.\.\.|…|\b[XN]\b|[\d<>=,.!?]+|: compression", message)
        longest = max((part.strip(" :;()") for part in parts), key=len)
        assert len(longest) >= 8, message
        assert message in not_ours or longest in given, f"{message!r}: {longest!r} is not said"
