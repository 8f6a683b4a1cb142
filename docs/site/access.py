"""What the theme forgets for people who use a keyboard or a screen reader."""

from __future__ import annotations


def on_post_page(output: str, **_: object) -> str:
    """The search is a dialog, and a dialog has a name."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
