"""Formulas become MathML when the site is built: they need no script, font or network."""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

# What pymdownx.arithmatex writes for $...$ and for $$...$$.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)
# How many parts these must have; the converter leaves out what is missing, without a word.
PARTS = {
    "mfrac": 2,
    "mroot": 2,
    "msub": 2,
    "msup": 2,
    "msubsup": 3,
    "munder": 2,
    "mover": 2,
}
# Any other environment would lose its shape, without a word.
KNOWN = {
    "pmatrix",
    "bmatrix",
    "matrix",
    "cases",
    "align",
    "align*",
    "aligned",
    "array",
    "split",
}


def on_page_content(html: str, page: Page, **_: object) -> str:
    where = page.file.src_uri
    html = INLINE.sub(
        lambda found: mathml(found[1], where, display="inline"), html
    )
    html = DISPLAY.sub(
        lambda found: mathml(found[1], where, display="block"), html
    )
    if 'class="arithmatex"' in html:
        raise PluginError(
            f"{where}: a formula is left that this page could not read."
        )
    return html


def mathml(formula: str, where: str, *, display: str) -> str:
    """One formula, or an error that names its page."""
    latex = unescape(formula).strip()
    braces = re.findall(r"(?<!\\)[{}]", latex)
    if braces.count("{") != braces.count("}"):
        raise PluginError(f"{where}: a brace of ${latex}$ has no other half.")
    try:
        made = convert(latex, display=display)
    except Exception as error:
        raise PluginError(
            f"{where}: ${latex}$ is no formula: {error!r}"
        ) from error
    # A command that is not known comes out as it went in.
    if unknown := re.search(r"\\\w+", unescape(made)):
        raise PluginError(f"{where}: {unknown[0]} in ${latex}$ is not known.")
    for environment in re.findall(r"\\begin\{(.*?)\}", latex):
        if environment not in KNOWN:
            raise PluginError(
                f"{where}: {environment} in ${latex}$ is not known."
            )
    try:
        parts = [*ElementTree.fromstring(made).iter()]
    except ElementTree.ParseError as error:
        raise PluginError(
            f"{where}: ${latex}$ is no formula: {error}"
        ) from error
    for part in parts:
        name = part.tag.rpartition("}")[2]
        if len(part) != PARTS.get(name, len(part)):
            raise PluginError(
                f"{where}: a part of a {name} in ${latex}$ is missing."
            )
    return f'<span class="formula formula-{display}">{made}</span>'
