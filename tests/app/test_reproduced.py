"""The part of the report that shows what was reproduced."""

from __future__ import annotations

from hdnn.app import reproduced

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 20


def test_pages_and_pictures_become_one_section(tmp_path):
    (tmp_path / "table-one.md").write_text(
        "# A table\n\nSome `code` and **bold** <b>, [more](other.md).\n\n- a\n- b\n\n"
        "| | x |\n| --- | --- |\n| row | **1** |\n\n![](fig-one.png)\n"
    )
    (tmp_path / "fig-one.png").write_bytes(PNG)
    (tmp_path / "other.md").write_text("# not shown")
    text = reproduced.section(tmp_path)
    for part in (
        "<h3>A table</h3>",
        "<code>code</code> and <strong>bold</strong> &lt;b&gt;, more.",
        "<li>a</li><li>b</li>",
        '<td class="text">row</td><td><strong>1</strong></td>',
        '<img alt="fig one" src="data:image/png;base64,',
    ):
        assert part in text
    assert "not shown" not in text
    assert "---" not in text


def test_nothing_is_shown_where_there_is_nothing(tmp_path):
    assert reproduced.section(tmp_path) == ""
    assert reproduced.section(tmp_path / "missing") == ""
    (tmp_path / "fig-bad.png").write_bytes(b"no picture")
    assert reproduced.section(tmp_path) == ""
