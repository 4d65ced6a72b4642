"""Fixtures that every test of the book may ask for by name."""

from .browser import address, browser, pages, site

__all__ = ["address", "browser", "pages", "site"]
