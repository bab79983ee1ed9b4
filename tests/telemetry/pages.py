"""What is true of every report, in a real browser."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

SMALLEST_PX = 12.0
"""Smallest text that counts as readable."""


def drawn(page: Page) -> dict[str, list[dict[str, Any]]]:
    """The data of every chart as plotly.js holds it, once each is drawn: an axis, and a line, bar or cells."""
    page.wait_for_function("[...document.querySelectorAll('.chart')].every(c => c.querySelector('.xtick text'))")
    empty = page.evaluate(
        """[...document.querySelectorAll('.chart')].filter(c => {
            const marks = c.querySelectorAll('.scatterlayer path.js-line, .points path, .heatmaplayer image');
            return ![...marks].some(m => m.getBoundingClientRect().width > 0);
        }).map(c => c.id)"""
    )
    assert empty == []
    found: dict[str, list[dict[str, Any]]] = page.evaluate(
        """Object.fromEntries([...document.querySelectorAll('.chart')].map(c => [c.id, c.data.map(
            t => ({name: t.name, type: t.type, x: t.x, y: t.y, z: t.z, base: t.base, customdata: t.customdata}))]))"""
    )
    return found


def readable(page: Page) -> None:
    """Nothing is wider than the screen, no text is too small, and text stands out from what is behind it."""
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1]
    sizes = page.evaluate(
        """[...document.querySelectorAll('body *')].filter(e => !['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(e.tagName)
            && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && e.getClientRects().length)
            .map(e => [parseFloat(getComputedStyle(e).fontSize), e.textContent.slice(0, 40)])"""
    )
    small = [s for s in sizes if s[0] < SMALLEST_PX]
    assert len(sizes) > 40 and small == []
    colours = page.evaluate(
        """[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
            ...[...document.querySelectorAll('.xtick text')].map(t => getComputedStyle(t).fill)]"""
    )
    back = luminance(colours[0])
    assert all(contrast(luminance(c), back) >= 7 for c in colours[1:])


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2.1)."""
    parts = [int(p) / 255 for p in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: float, b: float) -> float:
    """Contrast ratio of two luminances (WCAG 2.1)."""
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)
