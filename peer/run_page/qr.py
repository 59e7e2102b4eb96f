"""A text as a QR code, if the package for it is installed (the extra 'page')."""

from __future__ import annotations

import io


def qr_svg(text: str) -> bytes | None:
    """The code as an SVG image, dark on white; ``None`` without the package."""
    try:
        import segno
    except ImportError:
        return None
    out = io.BytesIO()
    segno.make(text, error="m", micro=False).save(
        out, kind="svg", scale=4, border=4, dark="#000", light="#fff", xmldecl=False, svgns=True
    )
    return out.getvalue()
