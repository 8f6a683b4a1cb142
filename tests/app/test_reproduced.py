"""The part of the report that shows what was reproduced."""

from __future__ import annotations

import pytest

from hdnn.app import reproduced

pytest.importorskip("markdown_it")

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 20


def test_pages_become_html_and_pictures_data(tmp_path):
    (tmp_path / "table-one.md").write_text(
        "# A table\n\nSome `code` and **bold** <b>, [more](other.md).\n\n- a\n- b\n\n"
        "| | x |\n| --- | --- |\n| row | **1** |\n\n![](fig-one.png)\n"
    )
    (tmp_path / "fig-one.png").write_bytes(PNG)
    (tmp_path / "other.md").write_text("# not shown")
    (text,) = reproduced.pages(tmp_path)
    for part in (
        "<h3>A table</h3>",
        "<code>code</code> and <strong>bold</strong> &lt;b&gt;, more.",
        "<li>a</li>\n<li>b</li>",
        '<div class="scroll" tabindex="0"><table>',
        "<td>row</td>\n<td><strong>1</strong></td>",
    ):
        assert part in text
    for part in ("---", "<a", "<img", "other.md", "not shown"):
        assert part not in text
    (picture,) = reproduced.pictures(tmp_path)
    assert picture.name == picture.caption == "fig one"


def test_html_and_scripts_of_a_page_are_escaped(tmp_path):
    (tmp_path / "fig-one.md").write_text(
        "<script>alert(1)</script>\n\n[a](javascript:alert(2)) <http://x.y> ![z](http://x.y/z.png)\n"
    )
    (text,) = reproduced.pages(tmp_path)
    assert "&lt;script&gt;" in text
    for part in ("<script", "<a", "<img", "href", "src"):
        assert part not in text


def test_nothing_is_shown_where_there_is_nothing(tmp_path):
    (tmp_path / "fig-bad.png").write_bytes(b"no picture")
    for folder in (tmp_path, tmp_path / "missing"):
        assert reproduced.pages(folder) == []
        assert reproduced.pictures(folder) == []
