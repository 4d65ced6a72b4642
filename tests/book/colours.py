"""How well two colours stand apart: the contrast of the Web Content Accessibility Guidelines."""

PAGES = {"light": "#ffffff", "dark": "#121212"}  # the grounds of the book's pages


def contrast(a: str, b: str) -> float:
    """From 1 to 21, for two colours as #rrggbb; small words need 4.5, other things 3."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
